// The states at the boundaries of segments: S_{j+1} = S_j P_j + B_j, in fp32, one segment after the other.
//
// Grid: (kCombineBlocks, H, N); a block owns kCombineRows rows of V, which do not depend on one another. Threads: the 128 columns, kCombineParts
// times: each part sums over its share of the 128 inner channels. P streams from L2, coalesced, a segment's whole share in flight at once; the rows
// of S lie in shared memory, where all threads read the same word.
#pragma once

#include "kernels/common/combine.h"
#include "kernels/common/forget.cuh"
#include "kernels/common/params.h"

namespace flash_kda {

__device__ __forceinline__ void combine(const ForwardParams& p) {
    constexpr int kInner = kHeadDim / kCombineParts;
    __shared__ __align__(16) float rows[kCombineRows][kHeadDim];          // of S_j
    __shared__ float partial[kCombineParts - 1][kCombineRows][kHeadDim];  // sums of the parts after the first
    allow_next_kernel();
    wait_for_earlier_kernels();
    if (p.forgotten != nullptr && is_settled(p, blockIdx.z, blockIdx.y)) return;
    const int column = threadIdx.x % kHeadDim, part = threadIdx.x / kHeadDim;
    const auto state = [&](int segment) {
        const long long number = (static_cast<long long>(blockIdx.z) * p.segments + segment) * p.H + blockIdx.y;
        return number * kHeadDim * kHeadDim;
    };
    const int first_row = blockIdx.x * kCombineRows * kHeadDim;  // offset in a state
    if (part == 0) {
#pragma unroll
        for (int r = 0; r < kCombineRows; ++r) rows[r][column] = p.boundary_states[state(1) + first_row + r * kHeadDim + column];
    }
    for (int segment = 1; segment < p.segments - 1; ++segment) {
        const float* transition = p.transitions + state(segment) + part * kInner * kHeadDim + column;
        float* next = p.boundary_states + state(segment + 1) + first_row + column;
        float x[kInner], sum[kCombineRows];
#pragma unroll
        for (int inner = 0; inner < kInner; ++inner) x[inner] = transition[inner * kHeadDim];
#pragma unroll
        for (int r = 0; r < kCombineRows; ++r) sum[r] = part == 0 ? next[r * kHeadDim] : 0.f;
        __syncthreads();  // S_j is there
#pragma unroll
        for (int inner = 0; inner < kInner; inner += 4) {
#pragma unroll
            for (int r = 0; r < kCombineRows; ++r) {
                const float4 s = *reinterpret_cast<const float4*>(&rows[r][part * kInner + inner]);
                sum[r] = fmaf(s.x, x[inner], sum[r]);
                sum[r] = fmaf(s.y, x[inner + 1], sum[r]);
                sum[r] = fmaf(s.z, x[inner + 2], sum[r]);
                sum[r] = fmaf(s.w, x[inner + 3], sum[r]);
            }
        }
        if (part > 0) {
#pragma unroll
            for (int r = 0; r < kCombineRows; ++r) partial[part - 1][r][column] = sum[r];
        }
        __syncthreads();  // all parts are, and S_j is no longer read
        if (part == 0) {
#pragma unroll
            for (int r = 0; r < kCombineRows; ++r) {
#pragma unroll
                for (int other = 0; other < kCombineParts - 1; ++other) sum[r] += partial[other][r][column];
                rows[r][column] = sum[r];
                next[r * kHeadDim] = sum[r];
            }
        }
    }
}

}  // namespace flash_kda

extern "C" __global__ void __launch_bounds__(flash_kda::kCombineThreads) flash_kda_combine(const __grid_constant__ flash_kda::ForwardParams p) {
    flash_kda::combine(p);
}
