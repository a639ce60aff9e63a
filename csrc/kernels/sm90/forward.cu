// Kimi Delta Attention, forward, for Hopper: wgmma for the two products with the state, mma.sync for the 16x16 ones, TMA for the bytes.
//
// Math: as in portable/forward.cu. Per 16-token chunk, with the state S [V, K] in fp32 registers:
//     P = S [K~ ; Q~]^T      D = V^T - P_k      U = D T^T      O = P_q + U scores^T      S <- S A_C + U K-
// Grid: one block per SM at most; each works through its share of the items (schedule.cuh).
// Roles: warpgroups 0 and 1 scan, 64 rows of V of the state each, for a whole sequence; in warpgroups 2 and 3 seven warps prepare, one chunk
// each, round robin, and one moves data.
// Shared memory (config.h): slots (slot.h), scratch of each prepare warp, barriers, a flag per slot.
// Measured cost: docs/kernel-notes.md.

#include <cutlass/arch/reg_reconfig.h>

#include "kernels/common/entry.cuh"
#include "kernels/common/scan_segment.cuh"
#include "kernels/sm90/config.h"
#include "kernels/sm90/wgmma.cuh"

namespace flash_kda::sm90 {

// This warp has read its operands of a chunk and written its part of O.
__device__ __forceinline__ void hand_over(uint32_t done) {
    cutlass::arch::fence_view_async_shared();  // O, for the TMA store
    __syncwarp();
    if (cute::elect_one_sync()) barrier_arrive(done);
}

// The next `left` chunks of an item. The order of what does not depend on one another was searched for few register copies: ptxas leaves none here, up to 60 in
// others.
template <bool kOutputs, class Config>
__device__ __forceinline__ void scan_chunks(State& s, Place<Config>& place, int left, uint32_t v_offset) {
    constexpr int kAhead = 3;  // blocks whose decays are fetched a chunk ahead
    float4 ahead[kAhead];
    if (left > 0) {
        barrier_wait(place.ready(), place.phase);
        const int here = fresh_lane();
#pragma unroll
        for (int i = 0; i < kAhead; ++i) ahead[i] = load_decay(place.slot(), i, here);
    }
    pin(s);  // as one block of registers, in which it then stays
    uint32_t done_before = 0;
    while (left > 0) {
        const uint32_t slot = place.slot(), slot16 = slot >> 4, done = place.done();
        const uint32_t collinear_at = place.collinear();

        // P: columns are k's tokens 0-7, 8-15, then q's.
        uint32_t a[8][4];
#pragma unroll
        for (int i = 0; i < 8; ++i) pack_fragment(a[i], s[2 * i], s[2 * i + 1]);
        float product[kOutputs ? 4 : 2][4] = {};
        pin(product);
        cute::warpgroup_arrive();
#pragma unroll
        for (int i = 0; i < 8; ++i) wgmma_tokens(product, a[i], key_query_descriptor(slot16, i));
        cute::warpgroup_commit_batch();

        // Meanwhile: hand over O of the chunk before, whose stores have long landed; see that the next chunk is ready (the wait also keeps
        // the compiler from mixing what follows into the instructions above).
        --left;
        if (done_before != 0) hand_over(done_before);
        done_before = done;
        place.advance();
        if (left > 0) barrier_wait(place.ready(), place.phase);
        const int here = fresh_lane();
        uint32_t v[4], scores[4];
        Transform transform;
        load_matrices_transposed(v, slot + slot::kValue + v_offset);
        transform.load(slot, here);
        __syncwarp();  // all of V is read before O is written over it
        pin(s);
        cute::warpgroup_wait<0>();
        pin(product);
        // Only now, for the state's bf16 copy takes the registers for its decays until here.
#pragma unroll
        for (int i = 0; i < 8; ++i) decay_block(s, i, i < kAhead ? ahead[i < kAhead ? i : 0] : load_decay(slot, i, here));
        if (kOutputs) load_matrices(scores, slot + slot::kScores + here * 16);
        const bool collinear = load_u32(collinear_at) != 0;

        float d[2][4], u[2][4] = {}, out[2][4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                d[h][2 * r] = bf16_low(v[2 * h + r]) - product[h][2 * r];
                d[h][2 * r + 1] = bf16_high(v[2 * h + r]) - product[h][2 * r + 1];
                if constexpr (kOutputs) {
                    out[h][2 * r] = product[2 + h][2 * r];
                    out[h][2 * r + 1] = product[2 + h][2 * r + 1];
                }
            }
        }
        uint32_t u_fragment[4], u_rest[4];
        transform.multiply(u, d);
        pack_fragment(u_fragment, u[0], u[1]);
        // O's products first: behind the state's they would wait for the tensor cores.
        if (kOutputs) multiply_scores(out, u_fragment, scores);
        if (collinear) {
            pack_fragment_rest(u_rest, u_fragment, u[0], u[1]);
            if (kOutputs) multiply_scores(out, u_rest, scores);
        }

        pin(s);
        cute::warpgroup_arrive();
        wgmma_state(s, u_fragment, key_minus_descriptor(slot16));
        cute::warpgroup_commit_batch();
        if (left > 0) {
            const int here = fresh_lane();
#pragma unroll
            for (int i = 0; i < kAhead; ++i) ahead[i] = load_decay(place.slot(), i, here);
        }
        if (kOutputs) {
            uint32_t o[4];
            pack_fragment(o, out[0], out[1]);
            store_matrices_transposed(slot + slot::kOut + v_offset, o);
        }
        cute::warpgroup_wait<0>();
        pin(s);
        if (collinear) add_key_minus(s, u_rest, BlockAddresses(slot, fragment_offset(fresh_lane())));
    }
    pin(s);
    if (done_before != 0) hand_over(done_before);
}

template <class Config>
__device__ __forceinline__ void forward(const ForwardParams& p, const Maps& maps) {
    const Block<Config> block(p);
    if (block.warp < kScanWarps) {
        cutlass::arch::warpgroup_reg_alloc<kScanRegisters>();
        const auto chunks = [&](State& s, Place<Config>& place, int count) {
            scan_chunks<true>(s, place, count, value_offset(threadIdx.x / 32, fresh_lane()));
        };
        if constexpr (Config::kSegments) {
            scan_segment(p, block, chunks, [&](State& s, Place<Config>& place, int count) {
                scan_chunks<false>(s, place, count, value_offset(threadIdx.x / 32, fresh_lane()));
            });
        } else {
            scan(p, block, chunks);
        }
    } else {
        cutlass::arch::warpgroup_reg_dealloc<kFeedRegisters>();
        feed(p, maps, block);
    }
}

}  // namespace flash_kda::sm90

FLASH_KDA_ENTRY(flash_kda_forward_sm90, sm90, Usual)
FLASH_KDA_ENTRY(flash_kda_forward_sm90_general, sm90, Usual::General)
FLASH_KDA_ENTRY(flash_kda_segments_sm90, sm90, Usual::Segments)
FLASH_KDA_ENTRY(flash_kda_segments_sm90_general, sm90, Usual::Segments::General)
