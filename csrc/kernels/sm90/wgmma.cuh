// Warpgroup products on the operands of a slot: descriptors of its tiles, and CuTe's atoms for fragments held in arrays.
#pragma once

#include <cute/arch/mma_sm90_gmma.hpp>

#include "kernels/common/slot.h"
#include "kernels/common/state.cuh"

namespace flash_kda::sm90 {

// Shared-memory matrix descriptor of a 128-byte-swizzled operand: address and leading offset in the low word, stride offset and swizzle in
// the high one, all in units of 16 bytes. `slot16` is the slot's address in that unit (below); the operand lies `offset` bytes from there. Sums of
// one variable and constants keep a descriptor at one instruction.
__device__ __forceinline__ uint64_t descriptor(uint32_t slot16, uint32_t offset, uint32_t leading_bytes) {
    constexpr uint32_t kStrideBytes = 1024;  // to the next 8 rows
    constexpr uint32_t kSwizzle128 = 1u << 30;
    constexpr uint32_t high = (kStrideBytes >> 4) | kSwizzle128;
    return (static_cast<uint64_t>(high) << 32) | (slot16 + ((offset >> 4) + ((leading_bytes >> 4) << 16)));
}

// [K~ ; Q~], 32 rows, channels 16i..16i+15: a K-major operand whose columns are tokens.
__device__ __forceinline__ uint64_t key_query_descriptor(uint32_t slot16, int i) {
    return descriptor(slot16, slot::kKey + (i >> 2) * slot::kKeyQueryPanelStride + (i & 3) * 32, 16);
}

// K-, 16 rows (tokens) of 128 channels: an N-major operand whose columns are channels.
__device__ __forceinline__ uint64_t key_minus_descriptor(uint32_t slot16) {
    return descriptor(slot16, slot::kKeyMinus, slot::kPanelStride);
}

using Major = cute::SM90::GMMA::Major;

// d[64x16] += a[64x16] b, for keys alone. The accumulator's quads are 8-column tiles.
__device__ __forceinline__ void wgmma_tokens(float (&d)[2][4], const uint32_t (&a)[4], uint64_t b) {
    cute::SM90::GMMA::MMA_64x16x16_F32BF16BF16_RS<Major::K, Major::K>::fma(a[0], a[1], a[2], a[3], b, d[0][0], d[0][1], d[0][2], d[0][3], d[1][0],
                                                                           d[1][1], d[1][2], d[1][3]);
}

// d[64x32] += a[64x16] b, for keys and queries.
__device__ __forceinline__ void wgmma_tokens(float (&d)[4][4], const uint32_t (&a)[4], uint64_t b) {
    cute::SM90::GMMA::MMA_64x32x16_F32BF16BF16_RS<Major::K, Major::K>::fma(a[0], a[1], a[2], a[3], b, d[0][0], d[0][1], d[0][2], d[0][3], d[1][0],
                                                                           d[1][1], d[1][2], d[1][3], d[2][0], d[2][1], d[2][2], d[2][3], d[3][0],
                                                                           d[3][1], d[3][2], d[3][3]);
}

// s[64x128] += a[64x16] b.
__device__ __forceinline__ void wgmma_state(State& s, const uint32_t (&a)[4], uint64_t b) {
    cute::SM90::GMMA::MMA_64x128x16_F32BF16BF16_RS<Major::K, Major::MN>::fma(
        a[0], a[1], a[2], a[3], b,  //
        s[0][0], s[0][1], s[0][2], s[0][3], s[1][0], s[1][1], s[1][2], s[1][3], s[2][0], s[2][1], s[2][2], s[2][3], s[3][0], s[3][1], s[3][2],
        s[3][3], s[4][0], s[4][1], s[4][2], s[4][3], s[5][0], s[5][1], s[5][2], s[5][3], s[6][0], s[6][1], s[6][2], s[6][3], s[7][0], s[7][1],
        s[7][2], s[7][3], s[8][0], s[8][1], s[8][2], s[8][3], s[9][0], s[9][1], s[9][2], s[9][3], s[10][0], s[10][1], s[10][2], s[10][3], s[11][0],
        s[11][1], s[11][2], s[11][3], s[12][0], s[12][1], s[12][2], s[12][3], s[13][0], s[13][1], s[13][2], s[13][3], s[14][0], s[14][1], s[14][2],
        s[14][3], s[15][0], s[15][1], s[15][2], s[15][3]);
}

// The instructions run on after they are issued, on registers that the compiler believes to be plain values: keep it from moving accesses
// across.
template <int kRows>
__device__ __forceinline__ void pin(float (&x)[kRows][4]) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int r = 0; r < 4; ++r) cute::warpgroup_fence_operand(x[i][r]);
    }
}

}  // namespace flash_kda::sm90
