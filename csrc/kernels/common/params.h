// What one forward call hands to a kernel. Shared by host and device: plain data, no CUDA header.
#pragma once

namespace flash_kda {

inline constexpr int kHeadDim = 128;       // K = V
inline constexpr int kChunkTokens = 16;    // C: with log-decay >= -5 a token, 1/A stays below e^80, inside fp32 and bf16 range
inline constexpr int kSnapshotChunks = 4;  // between two intermediate states

// Strides in elements. The innermost dimension is dense in every tensor.
struct TokenStrides {
    long long batch, token, head;
};

// How the natural-log decay of a token follows from g.
enum class Gate : int {
    kBounded,    // lower_bound * sigmoid(exp(A_log) * (g + dt_bias))
    kUnbounded,  // -exp(A_log) * softplus(g + dt_bias)
    kLogDecay,   // min(g, 0)
};

// Tensors that the copy engine cannot take, for their address, strides or dtype: bits of ForwardParams::by_hand.
namespace by_hand {
inline constexpr int kQuery = 1, kKey = 2, kValue = 4, kGate = 8, kOut = 16;
}

// [B, T, heads, 128], or without the last dimension.
struct TokenTensor {
    const void* data;  // null only where there are no tokens
    TokenStrides strides;
};

// [rows, H, V, K] or, with ForwardParams::key_first, [rows, H, K, V].
struct StateTensor {
    void* data;     // null: there is none
    long long row;  // elements from one row to the next; within a row all is dense
    int is_fp32;    // else bf16
};

struct IndexTensor {
    const void* data;
    int is_int64;  // else int32
};

// H counts value heads: those of v, g, beta, out and the states.
struct ForwardParams {
    TokenTensor q, k;        // bf16 [B, T, H / group, 128]
    TokenTensor v, g;        // [B, T, H, 128]
    TokenTensor beta;        // [B, T, H]
    TokenTensor out;         // bf16 [B, T, H, 128]
    const float* A_log;      // [H] or null: exp(A_log) is 1
    const float* dt_bias;    // [H, 128] or null: zero
    const void* cu_seqlens;  // [N + 1] or null: sequence n is batch row n
    StateTensor initial;     // zero without it
    StateTensor final;
    IndexTensor slots;  // [N]: rows of initial and final, none for what lies outside of [0, pool_rows); without it sequence n has row n
    // States saved on the way: before tokens 0, 64, 128, ... of each sequence in turn, and after `marks` [N, marks_each] tokens of it.
    StateTensor snapshots;
    StateTensor checkpoints;
    IndexTensor marks;
    int saves;  // whether there are snapshots or checkpoints
    int key_first;
    int pool_rows;
    int snapshot_rows;
    int marks_each;
    int by_hand;
    int group;  // value heads that share a query and a key
    Gate gate;
    int usual;    // gate bounded, g in bf16, q and k normalised here
    int general;  // or else, or something by hand, or states saved on the way: only kernels compiled for it (ring.h)
    int g_is_fp32;
    int normalise;  // q and k
    int beta_is_fp32;
    int beta_is_logit;
    float beta_factor;
    int cu_seqlens_is_int64;
    // If items are cut into segments (segments.cuh), for each block, all fp32: the state at the start of its segment, what its scans make of zero up to there
    // or the state itself [blocks, V, K], and what they make of the identity [blocks, K', K], transposed; and the same two at the ends of stretches.
    float* segment_states;
    float* segment_transitions;
    float* stretch_states;
    float* stretch_transitions;
    float* exchange;              // [blocks, 16, 144]: for kernels without room for it in shared memory
    unsigned long long* signals;  // [blocks, 11]
    int segments;                 // of each sequence
    int segment_tokens;           // a multiple of kChunkTokens; the last segment may be shorter, or empty
    int stretch_tokens;           // likewise
    // When whole items are shared out among blocks (schedule.cuh): at boundary b the state [b, V, K], fp32, of the item that is cut there, and flags
    // [b, 8], one for each 16 rows of V: equal to `ticket` once these rows have been written. Null: no item is cut.
    float* handoff_states;
    unsigned long long* handoff_flags;
    unsigned long long ticket;  // of this launch, below 2^63
    int may_forget;             // with handoff_states: items may be cut where their state turns out to be forgotten
    int T;                      // tokens in one batch row (all tokens with cu_seqlens)
    int H;
    int N;
    float scale;
    float lower_bound;  // of the bounded gate
};

}  // namespace flash_kda
