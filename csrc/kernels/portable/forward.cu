// Kimi Delta Attention, forward, for every GPU from sm_90 on: mma.sync for the products, TMA for the bytes.
//
// Math: kernel notes, "chunked form". Per 16-token chunk, with the state S [V, K] in fp32 registers:
//     P = S [K~ ; Q~]^T      D = V^T - P_k      U = D T^T      O = P_q + U scores^T      S <- S A_C + U K-
// Grid: one block per SM at most; each works through its share of the items (schedule.cuh).
// Roles: warps 0-7 scan (each holds 16 rows of V of the state for a whole sequence); the next warps prepare, one chunk each, round robin;
// the last warp moves data (TMA loads into a slot, TMA stores of O out of it).
// Shared memory (config.h): slots (slot.h), scratch of each prepare warp, barriers, a flag per slot.
// Measured cost: docs/kernel-notes.md.

#include "kernels/common/entry.cuh"
#include "kernels/common/scan_segment.cuh"
#include "kernels/portable/config.h"

namespace flash_kda::portable {

// The next `left` chunks of an item.
template <bool kOutputs, class Config>
__device__ __forceinline__ void scan_chunks(State& s, Place<Config>& place, int left, int warp) {
    for (; left > 0; --left, place.advance()) {
        const uint32_t slot = place.slot();
        barrier_wait(place.ready(), place.phase);

        const BlockAddresses operands(slot, fragment_offset(fresh_lane()));
        const int here = fresh_lane();
        const uint32_t v_offset = value_offset(warp, here);
        float p_k[2][4] = {}, out[2][4] = {};  // S K~^T and S Q~^T: tokens 0-7, 8-15
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            uint32_t a[4], k[4], q[4];
            pack_fragment(a, s[2 * i], s[2 * i + 1]);
            load_matrices(k, operands.key(i));
            if (kOutputs) load_matrices(q, operands.query(i));
            mma(p_k[0], a, k[0], k[2]);
            mma(p_k[1], a, k[1], k[3]);
            if (kOutputs) {
                mma(out[0], a, q[0], q[2]);
                mma(out[1], a, q[1], q[3]);
            }
        }

        uint32_t v[4], scores[4];
        Transform transform;
        load_matrices_transposed(v, slot + slot::kValue + v_offset);
        transform.load(slot, here);
        if (kOutputs) load_matrices(scores, slot + slot::kScores + here * 16);
        const bool collinear = load_u32(place.collinear()) != 0;
        __syncwarp();  // all of V is read before O is written over it
        float d[2][4], u[2][4] = {};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                d[h][2 * r] = bf16_low(v[2 * h + r]) - p_k[h][2 * r];
                d[h][2 * r + 1] = bf16_high(v[2 * h + r]) - p_k[h][2 * r + 1];
            }
        }
        uint32_t u_fragment[4];
        transform.multiply(u, d);
        pack_fragment(u_fragment, u[0], u[1]);
        if (kOutputs) multiply_scores(out, u_fragment, scores);
        uint32_t u_rest[4];
        if (collinear) {
            pack_fragment_rest(u_rest, u_fragment, u[0], u[1]);
            if (kOutputs) multiply_scores(out, u_rest, scores);
        }
        if (kOutputs) {
            uint32_t o[4];
            pack_fragment(o, out[0], out[1]);
            store_matrices_transposed(slot + slot::kOut + v_offset, o);
        }

#pragma unroll
        for (int i = 0; i < 8; ++i) {
            uint32_t k[4];
            load_matrices_transposed(k, operands.key_minus(i));
            decay_block(s, i, load_decay(slot, i, here));
            mma(s[2 * i], u_fragment, k[0], k[1]);
            mma(s[2 * i + 1], u_fragment, k[2], k[3]);
        }
        if (collinear) add_key_minus(s, u_rest, operands);
        cutlass::arch::fence_view_async_shared();  // O, for the TMA store
        __syncwarp();
        if (cute::elect_one_sync()) barrier_arrive(place.done());
    }
}

template <class Config>
__device__ __forceinline__ void forward(const ForwardParams& p, const Maps& maps) {
    const Block<Config> block(p);
    if (block.warp < kScanWarps) {
        const auto chunks = [&](State& s, Place<Config>& place, int count) { scan_chunks<true>(s, place, count, block.warp); };
        if constexpr (Config::kSegments) {
            scan_segment(p, block, chunks, [&](State& s, Place<Config>& place, int count) { scan_chunks<false>(s, place, count, block.warp); });
        } else {
            scan(p, block, chunks);
        }
    } else {
        feed(p, maps, block);
    }
}

}  // namespace flash_kda::portable

FLASH_KDA_ENTRY(flash_kda_forward_portable_wide, portable, Wide)
FLASH_KDA_ENTRY(flash_kda_forward_portable_wide_general, portable, Wide::General)
FLASH_KDA_ENTRY(flash_kda_segments_portable_wide, portable, Wide::Segments)
FLASH_KDA_ENTRY(flash_kda_segments_portable_wide_general, portable, Wide::Segments::General)
FLASH_KDA_ENTRY(flash_kda_forward_portable_narrow, portable, Narrow)
FLASH_KDA_ENTRY(flash_kda_forward_portable_narrow_general, portable, Narrow::General)
FLASH_KDA_ENTRY(flash_kda_segments_portable_narrow, portable, Narrow::Segments)
FLASH_KDA_ENTRY(flash_kda_segments_portable_narrow_general, portable, Narrow::Segments::General)
