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

#include "kernels/common/by_hand.cuh"
#include "kernels/common/gates.cuh"
#include "kernels/common/ring.h"
#include "kernels/common/tile.cuh"

namespace flash_kda {

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

// Zeros the rows past the sequence's end, whose raw content belongs to a neighbour or to nobody.
__device__ __forceinline__ void clear_tail_rows(uint32_t slot, int valid, int lane) {
    const int tile = lane >> 3, part = lane & 7;  // four tiles x eight 32-byte parts
    const uint32_t base = tile == 0 ? slot::kKey : tile == 1 ? slot::kQuery : tile == 2 ? slot::kGate : slot::kValue;
    const uint32_t stride = tile < 2 ? slot::kKeyQueryPanelStride : slot::kPanelStride;
    for (int row = valid; row < kChunkTokens; ++row) {
        uint32_t address = slot + base + (part >> 2) * stride + row * 128 + (part & 3) * 32;
        store_float4(address, 0.f, 0.f, 0.f, 0.f);
        store_float4(address + 16, 0.f, 0.f, 0.f, 0.f);
    }
    __syncwarp();
}

// v = 0.
__device__ __forceinline__ void clear_values(uint32_t slot, int lane) {
#pragma unroll
    for (int part = 0; part < 2 * slot::kPanelBytes; part += 512) store_float4(slot + slot::kValue + part + lane * 16, 0.f, 0.f, 0.f, 0.f);
    __syncwarp();
}

// Product of 8x8 matrices, lane's elements: a at row g, columns 2c and 2c+1; b at rows 2c and 2c+1, column g; the result as a. It is the
// upper half of an mma whose k = c stands for 2c, k = c+4 for 2c+1: so an accumulator is an A fragment. tf32 is accurate to 2^-11, which is
// finer than the bf16 that U becomes; `exact` adds what the cut to tf32 leaves over.
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

// What a warp holds of the chunk that it prepares, besides fragments.
struct Chunk {
    uint32_t slot, fragment;
    int lane;
    float k_norm[2], q_norm[2];  // factors on the rows g, g+8

    template <bool kQueries>
    __device__ __forceinline__ void load_block(int i, uint32_t (&k)[4], uint32_t (&q)[4]) const {
        load_matrices(k, block_address(slot, fragment, i, slot::kKey, slot::kKeyQueryPanelStride));
        if (kQueries) load_matrices(q, block_address(slot, fragment, i, slot::kQuery, slot::kKeyQueryPanelStride));
    }
};

using Products = float[2][4];  // of a chunk's tokens with one another: columns (tokens) 0-7, 8-15

// Where a channel decays by more than 2^-kSteep within a chunk, K^ = k^ / A would overflow. With raw keys, their elements' magnitude counts too.
inline constexpr float kSteep = 116.f, kSteepRaw = 64.f;

// Adds a block's part of M and of the scores where K^ would overflow: by halves, so that no exponent is positive. At each level a token t of the
// upper half of a group of 8, 4, 2, 1 + as many tokens meets a token s of the lower half as 2^(G_t - G_r) 2^(G_r - G_s), r the last of the lower half.
// One factor 2^-|G_t - G_r| for each token serves both. The scores' diagonal decays by nothing. Taken rarely: short rather than quick.
template <bool kQueries>
__device__ __forceinline__ void add_by_halves(const Chunk& chunk, const uint32_t (&k)[4], const uint32_t (&q)[4], const float (&cumulative)[2][4],
                                              Products& m, Products& scores) {
    const int g = chunk.lane >> 2, c = chunk.lane & 3;
#pragma unroll 1
    for (int half = 8; half >= 0; half = half == 1 ? 0 : half == 0 ? -1 : half / 2) {
        uint32_t k_decayed[4], q_decayed[4];
        const int reference = ((g & ~(2 * half - 1)) + half - 1) * 4 + c;  // whose lane holds r, of rows g and g+8 alike
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int f = 2 * n + r;
                float w[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float at = cumulative[n][2 * r + e];
                    const float its = __shfl_sync(~0u, half == 8 ? cumulative[n][e] : at, reference & 31);
                    w[e] = half == 0 ? 1.f : exp2_approx(-fabsf(at - its));
                }
                k_decayed[f] = pack_bf16(bf16_low(k[f]) * chunk.k_norm[r] * w[0], bf16_high(k[f]) * chunk.k_norm[r] * w[1]);
                if (kQueries) q_decayed[f] = pack_bf16(bf16_low(q[f]) * chunk.q_norm[r] * w[0], bf16_high(q[f]) * chunk.q_norm[r] * w[1]);
            }
        }
        Products m_part = {}, scores_part = {};
        mma(m_part[0], k_decayed, k_decayed[0], k_decayed[2]);
        mma(m_part[1], k_decayed, k_decayed[1], k_decayed[3]);
        if (kQueries) {
            mma(scores_part[0], q_decayed, k_decayed[0], k_decayed[2]);
            mma(scores_part[1], q_decayed, k_decayed[1], k_decayed[3]);
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            if (half == 8) {
                m[0][2 + e] += m_part[0][2 + e];
                scores[0][2 + e] += scores_part[0][2 + e];
                continue;
            }
            // Within 8 tokens, rows g of the first and g+8 of the second alike.
            const int s = 2 * c + e;
            if (half == 0 ? s == g : ((g ^ s) & ~(2 * half - 1)) == 0 && (g & half) != 0 && (s & half) == 0) {
                m[0][e] += m_part[0][e], m[1][2 + e] += m_part[1][2 + e];
                scores[0][e] += scores_part[0][e], scores[1][2 + e] += scores_part[1][2 + e];
            }
        }
    }
}

// The rest of block i, given its G. `kSteepToo`: it may decay by more than 2^-steep.
template <bool kSteepToo, bool kQueries>
__device__ __forceinline__ void finish_block(const Chunk& chunk, int i, const uint32_t (&k)[4], const uint32_t (&q)[4],
                                             const float (&cumulative)[2][4], Products& m, Products& scores, float steep = 0.f) {
    const int g = chunk.lane >> 2, c = chunk.lane & 3;
    const bool by_halves =
        kSteepToo && __any_sync(~0u, fminf(fminf(cumulative[0][2], cumulative[0][3]), fminf(cumulative[1][2], cumulative[1][3])) < -steep);
    if (by_halves) add_by_halves<kQueries>(chunk, k, q, cumulative, m, scores);
    float a[2][4];
    uint32_t k_decayed[4], q_decayed[4], k_inverse[4], k_minus[4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) a[n][e] = exp2_approx(cumulative[n][e]);
        // Of the last token: A, or if that may be zero, G.
        const auto& last = kSteepToo ? cumulative[n] : a[n];
        const float end[2] = {__shfl_sync(~0u, last[2], 28 + c), __shfl_sync(~0u, last[3], 28 + c)};
#pragma unroll
        for (int r = 0; r < 2; ++r) {  // rows g, g+8
            const int f = 2 * n + r;
            float kx[2] = {bf16_low(k[f]) * chunk.k_norm[r], bf16_high(k[f]) * chunk.k_norm[r]};
            float inverse[2], minus[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                inverse[e] = kx[e] * exp2_approx(-cumulative[n][2 * r + e]);
                minus[e] = kSteepToo ? kx[e] * exp2_approx(end[e] - cumulative[n][2 * r + e]) : inverse[e] * end[e];
            }
            k_decayed[f] = pack_bf16(kx[0] * a[n][2 * r], kx[1] * a[n][2 * r + 1]);
            if (kQueries) {
                float qx[2] = {bf16_low(q[f]) * chunk.q_norm[r], bf16_high(q[f]) * chunk.q_norm[r]};
                q_decayed[f] = pack_bf16(qx[0] * a[n][2 * r], qx[1] * a[n][2 * r + 1]);
            }
            k_inverse[f] = pack_bf16(inverse[0], inverse[1]);
            k_minus[f] = pack_bf16(minus[0], minus[1]);
        }
    }
    if (g == 7) store_float4(chunk.slot + slot::kDecay + i * 64 + c * 16, a[0][2], a[0][3], a[1][2], a[1][3]);

    if (!by_halves) {
        mma(m[0], k_decayed, k_inverse[0], k_inverse[2]);
        mma(m[1], k_decayed, k_inverse[1], k_inverse[3]);
        if (kQueries) {
            mma(scores[0], q_decayed, k_inverse[0], k_inverse[2]);
            mma(scores[1], q_decayed, k_inverse[1], k_inverse[3]);
        }
    }
    store_matrices(block_address(chunk.slot, chunk.fragment, i, slot::kKey, slot::kKeyQueryPanelStride), k_decayed);
    if (kQueries) store_matrices(block_address(chunk.slot, chunk.fragment, i, slot::kQuery, slot::kKeyQueryPanelStride), q_decayed);
    store_matrices(block_address(chunk.slot, chunk.fragment, i, slot::kKeyMinus, slot::kPanelStride), k_minus);
}

// Where a chunk comes from.
struct Origin {
    int batch, token, head;

    // Itself, but out of the compiler's sight: what seldom follows from it is then not computed ahead of time, into registers that others need.
    __device__ __forceinline__ Origin hidden() const {
        Origin origin = *this;
        asm volatile("" : "+r"(origin.batch), "+r"(origin.token), "+r"(origin.head));
        return origin;
    }
};

// `beta` is lane t's, activated, for t < valid, else 0. `scratch`: kScratchBytes. Returns whether some keys are near-equal. Without kQueries
// neither Q~ nor the scores are found.
template <bool kGeneral, bool kQueries>
__device__ __forceinline__ bool prepare_chunk(const ForwardParams& p, uint32_t slot, uint32_t scratch, uint32_t bias, GateConstants gate,
                                              const Origin& origin, float beta, int valid, int lane) {
    const int g = lane >> 2, c = lane & 3;
    const uint32_t fragment = fragment_offset(lane);

    if (valid < kChunkTokens) clear_tail_rows(slot, valid, lane);

    Chunk chunk = {slot, fragment, lane, {1.f, 1.f}, {1.f, 1.f}};
    if (!kGeneral || p.normalise) {
        inverse_norms(chunk.k_norm, slot, fragment, slot::kKey, lane);
        if (kQueries) inverse_norms(chunk.q_norm, slot, fragment, slot::kQuery, lane);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {  // finite, for a row of zeros times inf would be NaN
        float& norm = chunk.q_norm[r];
        norm *= p.scale;
        norm = norm > 1e38f ? 1e38f : norm < -1e38f ? -1e38f : norm;
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
    const auto load_gate = [&](int i, uint32_t (&raw)[4]) {
        load_matrices_transposed(raw, block_address(slot, fragment, i, slot::kGate, slot::kPanelStride));
    };

    Products m = {}, scores = {};
    if (!kGeneral || p.usual) {
        // G of block i. Gate, lane = channel: registers 0, 1 are channel g, tokens 2c.. and 8+2c..; 2, 3 are channel 8+g.
        const auto sum_log_decays = [&](int i, float (&cumulative)[2][4]) {
            uint32_t raw[4];
            load_gate(i, raw);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) cumulative[n][e] = 0.f;
                const float b = load_float(bias + (16 * i + 8 * n + g) * 4);
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const uint32_t pair = raw[2 * n + h];
                    const float x0 = bounded_decay(bf16_low(pair), b, gate), x1 = bounded_decay(bf16_high(pair), b, gate);
                    mma_tf32(cumulative[n], minus_ones[h], __float_as_uint(x0), __float_as_uint(x1));
                }
            }
        };

        // G one block ahead, so that its long chain runs beside the rest of the block before. Unrolled whole, the loop outgrows the instruction
        // cache; two at a time, for G to change places without being copied.
        const auto step = [&](int i, float (&current)[2][4], float (&next)[2][4]) {
            uint32_t k[4], q[4];
            chunk.load_block<kQueries>(i, k, q);
            sum_log_decays(i + 1, next);
            __syncwarp();  // the results go to the same places
            finish_block<false, kQueries>(chunk, i, k, q, current, m, scores);
        };
        float even[2][4], odd[2][4];
        sum_log_decays(0, even);
#pragma unroll 1
        for (int i = 0; i < 6; i += 2) step(i, even, odd), step(i + 1, odd, even);
        step(6, even, odd);
        uint32_t k[4], q[4];
        chunk.load_block<kQueries>(7, k, q);
        __syncwarp();
        finish_block<false, kQueries>(chunk, 7, k, q, odd, m, scores);
    } else if constexpr (kGeneral) {
        // The same for every gate, g in fp32, raw keys: rolled, to stay out of the way of what is usual.
        const float steep = p.normalise ? kSteep : kSteepRaw;
        const Origin from = origin.hidden();
        Chunk here = chunk;
        here.lane = fresh_lane();
        const int g = here.lane >> 2, c = here.lane & 3;
#pragma unroll 1
        for (int i = 0; i < 8; ++i) {
            float x[2][2][2];  // [n][h][e]: channel 16i + 8n + g, token 8h + 2c + e; zero past the end
            if (p.g_is_fp32) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int token = 8 * h + 2 * c + e;
                        const float* row = token_row<float>(p.g, from.batch, from.token + token, from.head) + 16 * i + g;
#pragma unroll
                        for (int n = 0; n < 2; ++n) x[n][h][e] = token < valid ? row[8 * n] : 0.f;
                    }
                }
            } else {
                uint32_t raw[4];
                load_gate(i, raw);
#pragma unroll
                for (int n = 0; n < 2; ++n) {
#pragma unroll
                    for (int h = 0; h < 2; ++h) x[n][h][0] = bf16_low(raw[2 * n + h]), x[n][h][1] = bf16_high(raw[2 * n + h]);
                }
            }
            float cumulative[2][4] = {};
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const float b = load_float(bias + (16 * i + 8 * n + g) * 4);
#pragma unroll
                for (int h = 0; h < 2; ++h) {
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float& y = x[n][h][e];
                        y = p.gate == Gate::kBounded     ? bounded_decay(y, b, gate)
                            : p.gate == Gate::kUnbounded ? unbounded_decay(y, b, gate)
                                                         : given_decay(y, gate);
                    }
                    mma_tf32(cumulative[n], minus_ones[h], __float_as_uint(x[n][h][0]), __float_as_uint(x[n][h][1]));
                }
            }
            uint32_t k[4], q[4];
            here.load_block<kQueries>(i, k, q);
            __syncwarp();  // the results go to the same places
            finish_block<true, kQueries>(here, i, k, q, cumulative, m, scores, steep);
        }
    }

    // Scores: lower triangle with the diagonal. Above it they are as large as e^80: select, do not multiply.
    if (kQueries) {
        const uint32_t at = slot + slot::kScores + lane * 4;
        const int s = 2 * c;
        store_u32(at, pack_bf16(s <= g ? scores[0][0] : 0.f, s + 1 <= g ? scores[0][1] : 0.f));
        store_u32(at + 2 * slot::kScoresBlockBytes, pack_bf16(scores[0][2], scores[0][3]));
        store_u32(at + 3 * slot::kScoresBlockBytes, pack_bf16(s <= g ? scores[1][2] : 0.f, s + 1 <= g ? scores[1][3] : 0.f));
    }

    // Of T's columns: beta, and what the scan's product of T and D loses, both operands being cut to tf32.
    const float factor = beta * (kCutToTf32 * kCutToTf32);
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
    if (lane < kChunkTokens) store_float(scratch + ((lane >> 2) * kScratchStride + kChunkTokens + (lane & 3)) * 4, factor);
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
    // Stores: a row of 8 of a diagonal block each by lanes 0-15, a pair of X21 by every lane.
    {
        const uint32_t b = scratch + ((block >> 2) * kScratchStride + kChunkTokens) * 4;
        const uint32_t at = slot + slot::kTransform + (block >> 3) * 2 * slot::kTransformBlockBytes + (row & 7) * 32;
        const float4 first = load_float4(b), second = load_float4(b + kScratchStride * 4);
        x[0] *= first.x, x[1] *= first.y, x[2] *= first.z, x[3] *= first.w;
        x[4] *= second.x, x[5] *= second.y, x[6] *= second.z, x[7] *= second.w;
        if (lane < kChunkTokens) store_float4(at, x[0], x[1], x[2], x[3]), store_float4(at + 16, x[4], x[5], x[6], x[7]);
    }
    store_float2(slot + slot::kTransform + slot::kTransformBlockBytes + lane * 8, -x21.x * __shfl_sync(~0u, factor, 2 * c),
                 -x21.y * __shfl_sync(~0u, factor, 2 * c + 1));
    return collinear;
}

}  // namespace flash_kda
