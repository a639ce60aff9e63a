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

// How a launch goes about its sequences. A sequence can be cut into segments to keep more multiprocessors busy: the state after a segment is
// S_out = S_in P + B, with P and B independent of S_in. One launch finds B and P of the segments (P: the same scan, from the identity and with
// v = 0), a small kernel the state at each boundary, another launch the outputs. See docs/kernel-notes.md.
//
// Where the gates forget a state within a few tokens, none of this is needed: see forget.cuh.
enum class Pass : int {
    kWhole,      // every sequence from its first token to its last
    kTrial,      // outputs and final states of those sequences whose states are forgotten before each segment
    kSummaries,  // of the others, B and P of all segments but the last; of the first, the state after it
    kSegments,   // outputs and final states, segment by segment
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
    int load_bytes;  // of a chunk, that the copy engine brings
    int group;       // value heads that share a query and a key
    Gate gate;
    int usual;    // gate bounded, g in bf16, q and k normalised here
    int general;  // or else, or something by hand, or states saved on the way: only kernels compiled for it (ring.h)
    int g_is_fp32;
    int normalise;  // q and k
    int beta_is_fp32;
    int beta_is_logit;
    float beta_factor;
    int cu_seqlens_is_int64;
    // Only with segments, fp32. [N, segments, H, V, K]: at the start of segment j, first B of the segment before, then the state (of segment 0 the
    // initial one). [N, segments, H, K, K]: P of segment j, for 1 <= j < segments - 1.
    float* boundary_states;
    float* transitions;
    // Or, when whole items are shared out among blocks (schedule.cuh): at boundary b the state [b, V, K], fp32, of the item that is cut there, and flags
    // [b, 8], one for each 16 rows of V: equal to handoff_ticket once these rows have been written. Null: no item is cut.
    float* handoff_states;
    unsigned long long* handoff_flags;
    unsigned long long handoff_ticket;
    int may_forget;  // with handoff_states: items may be cut where their state turns out to be forgotten
    // Of the passes over segments; null if there is no trial. [N, trial_segments, H]: whether the state is forgotten before a segment, but for the first.
    // [N, H, V, K], fp32: final states of the trial.
    unsigned long long* forgotten;
    float* trial_states;
    int trial_segments;
    Pass pass;
    int segments;        // of each sequence, in this pass
    int segment_tokens;  // a multiple of kChunkTokens; the last segment may be shorter, or empty
    int T;               // tokens in one batch row (all tokens with cu_seqlens)
    int H;
    int N;
    float scale;
    float lower_bound;  // of the bounded gate
};

}  // namespace flash_kda
