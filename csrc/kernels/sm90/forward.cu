// Kimi Delta Attention, forward, for Hopper: wgmma for the two products with the state, mma.sync for the 16x16 ones, TMA for the bytes.
//
// Math: as in portable/forward.cu. Per 16-token chunk, with the state S [V, K] in fp32 registers:
//     P = S [K~ ; Q~]^T      D = V^T - P_k      U = D T^T      O = P_q + U scores^T      S <- S A_C + U K-
// Grid: one block per (sequence, head), block index = sequence * H + head; one block per SM.
// Roles: warpgroups 0 and 1 scan, 64 rows of V of the state each, for the whole sequence; in warpgroups 2 and 3 seven warps prepare, one chunk
// each, round robin, and one moves data.
// Shared memory (config.h): slots (slot.h), the head's gate bias, a scratch matrix per prepare warp, barriers, a flag per slot.
// Measured cost: docs/kernel-notes.md.

#include <cutlass/arch/reg_reconfig.h>

#include "kernels/common/pipeline.cuh"
#include "kernels/common/state.cuh"
#include "kernels/sm90/config.h"
#include "kernels/sm90/wgmma.cuh"

namespace flash_kda::sm90 {

__device__ __forceinline__ void scan(const ForwardParams& p, const Block<Config>& block) {
    const auto& pipe = block.pipe;
    const int warp = block.warp, lane = block.lane, c = lane & 3;
    const uint32_t v_offset = value_offset(warp, lane);
    const long long index = state_pair_index(block.state_index(), warp, lane);
    State s;
    load_initial_state(s, p, index);

    const int count = block.chunks.count();
    for (int chunk = 0; chunk < count; ++chunk) {
        const uint32_t slot = pipe.slot(chunk);
        Barrier::wait(pipe.ready(chunk), Pipeline<Config>::phase(chunk));

        // P: columns are k's tokens 0-7, 8-15, then q's.
        uint32_t a[8][4];
#pragma unroll
        for (int i = 0; i < 8; ++i) pack_fragment(a[i], s[2 * i], s[2 * i + 1]);
        float product[4][4] = {};
        pin(product);
        cute::warpgroup_arrive();
#pragma unroll
        for (int i = 0; i < 8; ++i) wgmma_n32(product, a[i], key_query_descriptor(slot, i));
        cute::warpgroup_commit_batch();

        // Meanwhile: decay the state, whose bf16 copy the product reads.
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float4 decay = load_float4(slot + slot::kDecay + i * 64 + c * 16);
            s[2 * i][0] *= decay.x, s[2 * i][1] *= decay.y, s[2 * i][2] *= decay.x, s[2 * i][3] *= decay.y;
            s[2 * i + 1][0] *= decay.z, s[2 * i + 1][1] *= decay.w, s[2 * i + 1][2] *= decay.z, s[2 * i + 1][3] *= decay.w;
        }
        uint32_t v[4], high[4], low[4], scores[4];
        load_matrices_transposed(v, slot + slot::kValue + v_offset);
        load_matrices(high, slot + slot::kTransformHigh + lane * 16);
        load_matrices(low, slot + slot::kTransformLow + lane * 16);
        load_matrices(scores, slot + slot::kScores + lane * 16);
        const bool collinear = load_u32(pipe.collinear(chunk)) != 0;
        pin(s);
        cute::warpgroup_wait<0>();
        pin(product);

        float d[2][4], u[2][4] = {}, out[2][4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                d[h][2 * r] = bf16_low(v[2 * h + r]) - product[h][2 * r];
                d[h][2 * r + 1] = bf16_high(v[2 * h + r]) - product[h][2 * r + 1];
                out[h][2 * r] = product[2 + h][2 * r];
                out[h][2 * r + 1] = product[2 + h][2 * r + 1];
            }
        }
        uint32_t d_fragment[4], u_fragment[4], u_rest[4] = {};
        pack_fragment(d_fragment, d[0], d[1]);
        multiply_block_matrix(u, d_fragment, high);
        multiply_block_matrix(u, d_fragment, low);
        pack_fragment(u_fragment, u[0], u[1]);
        if (collinear) pack_fragment_rest(u_rest, u_fragment, u[0], u[1]);  // see portable/forward.cu

        pin(s);
        cute::warpgroup_arrive();
        wgmma_state(s, u_fragment, key_minus_descriptor(slot));
        if (collinear) wgmma_state(s, u_rest, key_minus_descriptor(slot));
        cute::warpgroup_commit_batch();

        // Meanwhile: O.
        multiply_block_matrix(out, u_fragment, scores);
        if (collinear) multiply_block_matrix(out, u_rest, scores);
        uint32_t o[4];
        pack_fragment(o, out[0], out[1]);
        store_matrices_transposed(slot + slot::kOut + v_offset, o);
        cutlass::arch::fence_view_async_shared();  // O, for the TMA store
        cute::warpgroup_wait<0>();
        pin(s);
        __syncwarp();
        if (lane == 0) Barrier::arrive(pipe.done(chunk));
    }

    store_final_state(s, p, index);
}

}  // namespace flash_kda::sm90

extern "C" __global__ void __launch_bounds__(flash_kda::sm90::Config::kThreads, 1)
    flash_kda_forward_sm90(const __grid_constant__ flash_kda::ForwardParams p, const __grid_constant__ flash_kda::Maps maps) {
    using namespace flash_kda;
    const Block<sm90::Config> block(p);
    if (block.warp < kScanWarps) {
        cutlass::arch::warpgroup_reg_alloc<sm90::kScanRegisters>();
        sm90::scan(p, block);
    } else {
        cutlass::arch::warpgroup_reg_dealloc<sm90::kFeedRegisters>();
        block.feed(p, maps);
    }
}
