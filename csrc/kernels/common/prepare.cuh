// Prepare: one warp turns the raw 16-token tiles of a slot into the operands of the state step, in place.
//
//   k^, q^ = k, q / |.|            G_t = sum_{s<=t} log2-decay       A_t = 2^G_t
//   K~ = k^ A     Q~ = scale q^ A     K^ = k^ / A     K- = K^ A_C
//   M = strict_lower(K~ K^^T)      scores = lower(Q~ K^^T)           T = (I + diag(beta) M)^-1 diag(beta)
//
// A lane holds everything in the layout of an mma A fragment: with g = lane/4 and c = lane%4, rows (tokens) g and g+8, and of each
// 16-channel block the columns 2c, 2c+1, 8+2c, 9+2c. K~ and Q~ are A fragments and the same registers of K^ are B fragments
// (columns are tokens), so M and the scores never leave registers. The cumulative sum is a product with a triangle of minus ones, whose result
// has the same layout. T comes from substitution: near-equal keys make any truncated series for the inverse blow up.
#pragma once

#include "kernels/common/ring.h"
#include "kernels/common/tile.cuh"

namespace flash_kda {

inline constexpr float kLog2E = 1.44269504088896340736f;

// Per-head constants of the gate: minus the log2-decay is -bound * sigmoid(a * (g + dt_bias)) = 1 / (floor + 2^(slope*g + bias)) with
// floor = -1/bound and bias[ch] = slope*dt_bias[ch] + log2(floor), the latter in shared memory.
struct GateConstants {
    float slope;
    float floor;
};

__device__ __forceinline__ GateConstants gate_constants(const ForwardParams& p, int head) {
    // exp(A_log) beyond 1e30 cannot change a sigmoid but could turn 0 * inf into NaN. (Not fminf, which would hide a NaN.)
    float a = expf(p.A_log[head]);
    a = a > 1e30f ? 1e30f : a;
    // A bound nearer to zero decays nothing in fp32. The tensor cores cut the log-decays to tf32: 0.72 * 2^-11 is what they lose on average.
    const float bound = fminf(p.lower_bound, -1e-30f) * (kLog2E * (1.f + 0.7213f / 2048.f));
    return {-a * kLog2E, reciprocal_approx(-bound)};
}

__device__ __forceinline__ void store_gate_bias(uint32_t bias, const GateConstants& gate, const float* dt_bias, int lane) {
#pragma unroll
    for (int channel = lane; channel < kHeadDim; channel += 32) {
        // Finite, so that slope*g + bias is never inf - inf.
        const float x = gate.slope * dt_bias[channel];
        store_float(bias + channel * 4, (x < -1e38f ? -1e38f : x > 1e38f ? 1e38f : x) + log2f(gate.floor));
    }
    __syncwarp();
}

// 1/|row| of a 16x128 tile for rows g and g+8 of this lane. The sums of squares are the diagonal of x x^T.
__device__ __forceinline__ void inverse_norms(float (&inverse)[2], uint32_t slot, uint32_t fragment, int tile, int lane) {
    float upper[4] = {}, lower[4] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        uint32_t x[4];
        load_matrices(x, block_address(slot, fragment, i, tile, slot::kKeyQueryPanelStride));
        // Eight channels at a time: the 16-channel form wants its B registers side by side, which these are not.
        mma_k8(upper, x[0], x[1], x[0]);
        mma_k8(lower, x[0], x[1], x[1]);
        mma_k8(upper, x[2], x[3], x[2]);
        mma_k8(lower, x[2], x[3], x[3]);
    }
    const int g = lane >> 2;
    const int holder = (lane & 28) + (g >> 1);  // row g's diagonal lies in column 2*(g/2) + g%2
    inverse[0] = rsqrt_approx(__shfl_sync(~0u, (g & 1) ? upper[1] : upper[0], holder) + 1e-6f);
    inverse[1] = rsqrt_approx(__shfl_sync(~0u, (g & 1) ? lower[3] : lower[2], holder) + 1e-6f);
}

// Zeros the rows of k, q and g past the sequence's end, whose raw content belongs to a neighbour or to nobody.
__device__ __forceinline__ void clear_tail_rows(uint32_t slot, int valid, int lane) {
    const int tile = lane >> 3, part = lane & 7;  // three tiles x eight 32-byte parts
    const uint32_t base = tile == 0 ? slot::kKey : tile == 1 ? slot::kQuery : slot::kGate;
    const uint32_t stride = tile < 2 ? slot::kKeyQueryPanelStride : slot::kPanelStride;
    for (int row = valid; row < kChunkTokens && tile < 3; ++row) {
        uint32_t address = slot + base + (part >> 2) * stride + row * 128 + (part & 3) * 32;
        store_float4(address, 0.f, 0.f, 0.f, 0.f);
        store_float4(address + 16, 0.f, 0.f, 0.f, 0.f);
    }
    __syncwarp();
}

// Product of 8x8 matrices, lane's elements: a at row g, columns 2c and 2c+1; b at rows 2c and 2c+1, column g; the result as a. It is the
// upper half of an mma whose k = c stands for 2c, k = c+4 for 2c+1: so an accumulator is an A fragment. tf32 is accurate to 2^-11, which is
// finer than the bf16 that T becomes; `exact` adds what the cut to tf32 leaves over.
__device__ __forceinline__ float2 multiply_8x8(float a0, float a1, float b0, float b1, bool exact) {
    const auto rest = [](float x) { return __float_as_uint(x - __uint_as_float(__float_as_uint(x) & 0xffffe000u)); };
    float d[4] = {};
    const uint32_t a[4] = {__float_as_uint(a0), 0u, __float_as_uint(a1), 0u};
    mma_tf32(d, a, __float_as_uint(b0), __float_as_uint(b1));
    if (exact) {
        const uint32_t a_rest[4] = {rest(a0), 0u, rest(a1), 0u};
        mma_tf32(d, a_rest, __float_as_uint(b0), __float_as_uint(b1));
        mma_tf32(d, a, rest(b0), rest(b1));
    }
    return {d[0], d[1]};
}

// Above this |beta_t K~_t . K^_s| the keys of a chunk count as near-equal.
inline constexpr float kCollinear = 0.5f;

// `beta` is lane t's sigmoid(logit) for t < valid, else 0. `scratch`: kScratchBytes. Returns whether some keys are near-equal; only then the low
// half of T is written.
__device__ __forceinline__ bool prepare_chunk(uint32_t slot, uint32_t scratch, uint32_t bias, GateConstants gate, float scale, float beta, int valid,
                                              int lane) {
    const int g = lane >> 2, c = lane & 3;
    const uint32_t fragment = fragment_offset(lane);

    if (valid < kChunkTokens) clear_tail_rows(slot, valid, lane);

    float k_norm[2], q_norm[2];
    inverse_norms(k_norm, slot, fragment, slot::kKey, lane);
    inverse_norms(q_norm, slot, fragment, slot::kQuery, lane);
#pragma unroll
    for (int r = 0; r < 2; ++r) {  // finite, for a row of zeros times inf would be NaN
        q_norm[r] *= scale;
        q_norm[r] = q_norm[r] > 1e38f ? 1e38f : q_norm[r] < -1e38f ? -1e38f : q_norm[r];
    }

    // Triangle of minus ones, tokens as columns. Its columns are permuted (k = c is token 2c, k = c+4 is token 2c+1) to match the transposed
    // loads of g, which give token pairs. Columns past the end are zero: decay 1 there.
    uint32_t minus_ones[2][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            int token = 8 * h + 2 * c + (r >> 1), row = g + 8 * (r & 1);
            minus_ones[h][r] = token <= row && token < valid ? 0xbf800000u : 0u;
        }
    }

    // G of block i. Gate, lane = channel: registers 0, 1 are channel g, tokens 2c.. and 8+2c..; 2, 3 are channel 8+g.
    const auto sum_log_decays = [&](int i, float (&cumulative)[2][4]) {
        uint32_t raw[4];
        load_matrices_transposed(raw, block_address(slot, fragment, i, slot::kGate, slot::kPanelStride));
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) cumulative[n][e] = 0.f;
            const float b = load_float(bias + (16 * i + 8 * n + g) * 4);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const uint32_t pair = raw[2 * n + h];
                const float e0 = exp2_approx(fmaf(bf16_low(pair), gate.slope, b)), e1 = exp2_approx(fmaf(bf16_high(pair), gate.slope, b));
                const float x0 = reciprocal_approx(gate.floor + e0), x1 = reciprocal_approx(gate.floor + e1);
                mma_tf32(cumulative[n], minus_ones[h], __float_as_uint(x0), __float_as_uint(x1));
            }
        }
    };

    float m[2][4] = {}, scores[2][4] = {};  // columns (tokens) 0-7, 8-15
    // The rest of block i, given its G.
    const auto finish_block = [&](int i, const uint32_t (&k)[4], const uint32_t (&q)[4], const float (&cumulative)[2][4]) {
        float a[2][4];
        uint32_t k_decayed[4], q_decayed[4], k_inverse[4], k_minus[4];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) a[n][e] = exp2_approx(cumulative[n][e]);
            const float a_end[2] = {__shfl_sync(~0u, a[n][2], 28 + c), __shfl_sync(~0u, a[n][3], 28 + c)};
#pragma unroll
            for (int r = 0; r < 2; ++r) {  // rows g, g+8
                const int f = 2 * n + r;
                float kx[2] = {bf16_low(k[f]) * k_norm[r], bf16_high(k[f]) * k_norm[r]};
                float qx[2] = {bf16_low(q[f]) * q_norm[r], bf16_high(q[f]) * q_norm[r]};
                float inverse[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) inverse[e] = kx[e] * exp2_approx(-cumulative[n][2 * r + e]);
                k_decayed[f] = pack_bf16(kx[0] * a[n][2 * r], kx[1] * a[n][2 * r + 1]);
                q_decayed[f] = pack_bf16(qx[0] * a[n][2 * r], qx[1] * a[n][2 * r + 1]);
                k_inverse[f] = pack_bf16(inverse[0], inverse[1]);
                k_minus[f] = pack_bf16(inverse[0] * a_end[0], inverse[1] * a_end[1]);
            }
        }
        if (g == 7) store_float4(slot + slot::kDecay + i * 64 + c * 16, a[0][2], a[0][3], a[1][2], a[1][3]);

        mma(m[0], k_decayed, k_inverse[0], k_inverse[2]);
        mma(m[1], k_decayed, k_inverse[1], k_inverse[3]);
        mma(scores[0], q_decayed, k_inverse[0], k_inverse[2]);
        mma(scores[1], q_decayed, k_inverse[1], k_inverse[3]);
        store_matrices(block_address(slot, fragment, i, slot::kKey, slot::kKeyQueryPanelStride), k_decayed);
        store_matrices(block_address(slot, fragment, i, slot::kQuery, slot::kKeyQueryPanelStride), q_decayed);
        store_matrices(block_address(slot, fragment, i, slot::kKeyMinus, slot::kPanelStride), k_minus);
    };
    const auto load_block = [&](int i, uint32_t (&k)[4], uint32_t (&q)[4]) {
        load_matrices(k, block_address(slot, fragment, i, slot::kKey, slot::kKeyQueryPanelStride));
        load_matrices(q, block_address(slot, fragment, i, slot::kQuery, slot::kKeyQueryPanelStride));
    };

    // G one block ahead, so that its long chain runs beside the rest of the block before. Unrolled whole, the loop outgrows the instruction
    // cache.
    float cumulative[2][4];
    sum_log_decays(0, cumulative);
#pragma unroll 2
    for (int i = 0; i < 7; ++i) {
        uint32_t k[4], q[4];
        load_block(i, k, q);
        float next[2][4];
        sum_log_decays(i + 1, next);
        __syncwarp();  // the results go to the same places
        finish_block(i, k, q, cumulative);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) cumulative[n][e] = next[n][e];
        }
    }
    {
        uint32_t k[4], q[4];
        load_block(7, k, q);
        __syncwarp();
        finish_block(7, k, q, cumulative);
    }

    // Scores: lower triangle with the diagonal. Above it they are as large as e^80: select, do not multiply.
    {
        const uint32_t at = slot + slot::kScores + lane * 4;
        const int s = 2 * c;
        store_u32(at, pack_bf16(s <= g ? scores[0][0] : 0.f, s + 1 <= g ? scores[0][1] : 0.f));
        store_u32(at + slot::kBlockBytes, 0u);
        store_u32(at + 2 * slot::kBlockBytes, pack_bf16(scores[0][2], scores[0][3]));
        store_u32(at + 3 * slot::kBlockBytes, pack_bf16(s <= g ? scores[1][2] : 0.f, s + 1 <= g ? scores[1][3] : 0.f));
    }

    // T = X diag(beta), X = (I + L)^-1, L = diag(beta) M, in 8x8 blocks: X11 and X22 by substitution, X21 = -X22 L21 X11. L goes to the
    // scratch transposed, X11 and X22 then over it, by rows.
    const float beta_low = __shfl_sync(~0u, beta, g), beta_high = __shfl_sync(~0u, beta, g + 8);
    bool near_equal = false;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        m[0][e] *= beta_low, m[0][2 + e] *= beta_high, m[1][2 + e] *= beta_high;
        near_equal |= fabsf(m[0][2 + e]) > kCollinear;
        near_equal |= 2 * c + e < g && fmaxf(fabsf(m[0][e]), fabsf(m[1][2 + e])) > kCollinear;
        store_float(scratch + ((2 * c + e) * kScratchStride + g) * 4, m[0][e]);
        store_float(scratch + ((2 * c + e + 8) * kScratchStride + g + 8) * 4, m[1][2 + e]);
    }
    const bool collinear = __any_sync(~0u, near_equal);
    if (lane < kChunkTokens) store_float(scratch + ((lane >> 2) * kScratchStride + kChunkTokens + (lane & 3)) * 4, beta);
    __syncwarp();
    // Lane i of 16 finds its row within its block: x_ij = [i = j] - sum_{k>j} x_ik L_kj. (Lanes 16-31 repeat them.)
    const int row = lane & 15, block = (row >> 3) * 8;
    const uint32_t diagonal = scratch + (block * kScratchStride + block) * 4;
    float x[8];
#pragma unroll
    for (int j = 7; j >= 0; --j) {
        float sum[2] = {j == row - block ? 1.f : 0.f, 0.f};
#pragma unroll
        for (int k4 = (j + 1) / 4; k4 < 2; ++k4) {
            const float4 l = load_float4(diagonal + (j * kScratchStride + 4 * k4) * 4);
            if (4 * k4 > j) sum[0] = fmaf(-l.x, x[4 * k4], sum[0]);
            if (4 * k4 + 1 > j) sum[1] = fmaf(-l.y, x[4 * k4 + 1], sum[1]);
            if (4 * k4 + 2 > j) sum[0] = fmaf(-l.z, x[4 * k4 + 2], sum[0]);
            if (4 * k4 + 3 > j) sum[1] = fmaf(-l.w, x[4 * k4 + 3], sum[1]);
        }
        x[j] = sum[0] + sum[1];
    }
    __syncwarp();
    if (lane < kChunkTokens) {
        store_float4(scratch + (row * kScratchStride + block) * 4, x[0], x[1], x[2], x[3]);
        store_float4(scratch + (row * kScratchStride + block + 4) * 4, x[4], x[5], x[6], x[7]);
    }
    __syncwarp();
    // -X21: L21 X11, then X22 times it. Both take the right factor by rows 2c, 2c+1, column g; m[0][2..3] is L21 by row g, columns 2c, 2c+1.
    const uint32_t rows = scratch + (2 * c * kScratchStride + g) * 4;
    const float2 y = multiply_8x8(m[0][2], m[0][3], load_float(rows), load_float(rows + kScratchStride * 4), collinear);
    // Transposed through the scratch's free corner.
    store_float(scratch + (2 * c * kScratchStride + 8 + g) * 4, y.x);
    store_float(scratch + ((2 * c + 1) * kScratchStride + 8 + g) * 4, y.y);
    __syncwarp();
    const uint32_t x22_row = scratch + ((8 + g) * kScratchStride + 8 + 2 * c) * 4, y_column = scratch + (g * kScratchStride + 8 + 2 * c) * 4;
    const float2 x21 = multiply_8x8(load_float(x22_row), load_float(x22_row + 4), load_float(y_column), load_float(y_column + 4), collinear);
    // Stores: a row of 8 of a diagonal block each by lanes 0-15; a pair of X21 and of the zero block by every lane. Then what bf16 left over.
    const uint32_t row_at = slot + (block >> 3) * 3 * slot::kBlockBytes + (row & 7) * 16, pair_at = slot + lane * 4;
    uint32_t t[4];
    float2 pair;
    {
        const uint32_t b = scratch + ((block >> 2) * kScratchStride + kChunkTokens) * 4;
        const float4 first = load_float4(b), second = load_float4(b + kScratchStride * 4);
        x[0] *= first.x, x[1] *= first.y, x[2] *= first.z, x[3] *= first.w;
        x[4] *= second.x, x[5] *= second.y, x[6] *= second.z, x[7] *= second.w;
        pair.x = -x21.x * __shfl_sync(~0u, beta, 2 * c), pair.y = -x21.y * __shfl_sync(~0u, beta, 2 * c + 1);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) t[j] = pack_bf16(x[2 * j], x[2 * j + 1]);
    uint32_t t21 = pack_bf16(pair.x, pair.y);
    if (lane < kChunkTokens) store_u32x4(row_at + slot::kTransformHigh, t);
    store_u32(pair_at + slot::kTransformHigh + slot::kBlockBytes, 0u);
    store_u32(pair_at + slot::kTransformHigh + 2 * slot::kBlockBytes, t21);
    if (collinear) {
#pragma unroll
        for (int j = 0; j < 4; ++j) t[j] = pack_bf16(x[2 * j] - bf16_low(t[j]), x[2 * j + 1] - bf16_high(t[j]));
        t21 = pack_bf16(pair.x - bf16_low(t21), pair.y - bf16_high(t21));
        if (lane < kChunkTokens) store_u32x4(row_at + slot::kTransformLow, t);
        store_u32(pair_at + slot::kTransformLow + slot::kBlockBytes, 0u);
        store_u32(pair_at + slot::kTransformLow + 2 * slot::kBlockBytes, t21);
    }
    return collinear;
}

}  // namespace flash_kda
