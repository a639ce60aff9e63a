// What one forward call hands to a kernel. Shared by host and device: plain data, no CUDA header.
#pragma once

namespace flash_kda {

inline constexpr int kHeadDim = 128;     // K = V
inline constexpr int kChunkTokens = 16;  // C: with log-decay >= -5 a token, 1/A stays below e^80, inside fp32 and bf16 range

// Strides in elements. The innermost dimension is dense in every tensor.
struct TokenStrides {
    long long batch, token, head;
};

struct ForwardParams {
    const void* beta;  // bf16 logits [B, T, H]
    void* out;         // bf16 [B, T, H, 128]
    TokenStrides beta_strides;
    TokenStrides out_strides;
    const float* A_log;         // [H]
    const float* dt_bias;       // [H, 128]
    const void* initial_state;  // [N, H, V, K] or null: zero
    void* final_state;          // [N, H, V, K] or null: not wanted
    const void* cu_seqlens;     // [N + 1] or null: sequence n is batch row n
    int initial_is_fp32;        // else bf16
    int final_is_fp32;
    int cu_seqlens_is_int64;  // else int32
    int T;                    // tokens in one batch row (all tokens with cu_seqlens)
    int H;
    int N;
    float scale;
    float lower_bound;  // natural-log decay of one token is lower_bound * sigmoid(...)
};

}  // namespace flash_kda
