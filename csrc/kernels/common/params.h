// What one forward call hands to a kernel. Shared by host and device: plain data, no CUDA header.
#pragma once

namespace flash_kda {

inline constexpr int kHeadDim = 128;     // K = V
inline constexpr int kChunkTokens = 16;  // C: with log-decay >= -5 a token, 1/A stays below e^80, inside fp32 and bf16 range

// Strides in elements. The innermost dimension is dense in every tensor.
struct TokenStrides {
    long long batch, token, head;
};

// How a launch goes about its sequences. A sequence can be cut into segments to keep more multiprocessors busy: the state after a segment is
// S_out = S_in P + B, with P and B independent of S_in. One launch finds B and P of the segments (P: the same scan, from the identity and with
// v = 0), a small kernel the state at each boundary, another launch the outputs. See docs/kernel-notes.md.
enum class Pass : int {
    kWhole,      // every sequence from its first token to its last
    kSummaries,  // B, P of all segments but the last; of the first, the state after it
    kSegments,   // outputs and final states, segment by segment
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
    // Only with segments, fp32. [N, segments, H, V, K]: at the start of segment j, first B of the segment before, then the state (of segment 0 the
    // initial one). [N, segments, H, K, K]: P of segment j, for 1 <= j < segments - 1.
    float* boundary_states;
    float* transitions;
    // Or, when whole items are shared out among teams (schedule.cuh): at boundary b the state [b, V, K], fp32, of the item that is cut there, and flags
    // [b, 8], one for each 16 rows of V: equal to handoff_ticket once these rows have been written. Null: no item is cut.
    float* handoff_states;
    unsigned long long* handoff_flags;
    unsigned long long handoff_ticket;
    Pass pass;
    int pairing;         // of blocks: 0 never, 1 always, 2 as the lengths suggest
    int segments;        // of each sequence
    int segment_tokens;  // a multiple of kChunkTokens; the last segment may be shorter, or empty
    int T;               // tokens in one batch row (all tokens with cu_seqlens)
    int H;
    int N;
    float scale;
    float lower_bound;  // natural-log decay of one token is lower_bound * sigmoid(...)
};

}  // namespace flash_kda
