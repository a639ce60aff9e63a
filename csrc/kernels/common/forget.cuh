// Where a state is forgotten, what comes after does not wait for what came before.
//
// The state after some tokens is S P + B, with P and B independent of the state S before them. Where the gates decay fast, all of P is next to nothing
// after a few dozen tokens: then B is the state. So the part of an item after a cut can start from zero, kWindowTokens before the cut, if P of this window
// proves to be negligible. A scan warp goes through the window twice, as through items that write nothing: from the identity with v = 0, which gives P, and
// from zero, which gives B. If P is not negligible the state is waited for after all. So nothing depends on luck but the time.
//
// The windows cost 8 chunks, wherever they are in vain: a survey of the window's decays decides at the block's start whether to go through them. It proves
// nothing: some channel may hardly decay at one token, another one at the next.
#pragma once

#include "kernels/common/gates.cuh"
#include "kernels/common/schedule.cuh"

namespace flash_kda {

// Of each entry of P. What is left out is then at most 128 * 2^-64 = 2^-57 of the largest entry of the state before the window.
inline constexpr float kNegligible = 0x1p-64f;
// In powers of two, of the channel that decays least: random keys and gates leave of P up to 2^50 times what this says.
inline constexpr float kPromisingDecay = 80.f;

// Whether the tokens before `token` of a batch row seem to forget, by all threads of the block. `scratch`: of shared memory, kThreads floats.
template <class Config>
__device__ __forceinline__ bool seems_forgotten(const ForwardParams& p, uint32_t scratch, int batch, int token, int head) {
    constexpr int kGroups = Config::kThreads / kHeadDim;
    const int thread = threadIdx.x, channel = thread % kHeadDim, group = thread / kHeadDim;
    const GateConstants gate = gate_constants(p, head);
    const float bias = gate_bias(p, gate, head, channel);
    const bool fp32 = Config::kGeneral && p.g_is_fp32;
    float sum = 0.f;
    if (group < kGroups) {
#pragma unroll 16
        for (int t = group; t < kWindowTokens; t += kGroups) {
            const long long at = batch * p.g.strides.batch + (token - kWindowTokens + t) * p.g.strides.token + head * p.g.strides.head + channel;
            const float g = fp32 ? static_cast<const float*>(p.g.data)[at] : bf16_low(static_cast<const unsigned short*>(p.g.data)[at]);
            if (!Config::kGeneral || p.gate == Gate::kBounded) {
                sum += bounded_decay(g, bias, gate);
            } else {
                sum += p.gate == Gate::kUnbounded ? unbounded_decay(g, bias, gate) : given_decay(g, gate);
            }
        }
    }
    store_float(scratch + thread * 4, sum);
    __syncthreads();
    float all = 0.f;
#pragma unroll
    for (int other = 0; other < kGroups; ++other) all += load_float(scratch + (other * kHeadDim + channel) * 4);
    return __syncthreads_and(all >= kPromisingDecay);  // not for a NaN
}

// Sees at a block's start whether windows lead up to its part of an item. By all threads, after find_share and a barrier; another one must follow.
template <class Config>
__device__ __forceinline__ void survey_share(const ForwardParams& p, uint32_t at, uint32_t scratch) {
    const int last_cut = share::word(at, share::kLastCut);
    if (last_cut == 0) return;
    const Item item = find_whole(p, share::word(at, share::kLast));
    if (item.count() < share::word(at, share::kLong)) return;
    const bool tries = seems_forgotten<Config>(p, scratch, item.batch, item.first + (item.count() - last_cut) * kChunkTokens, item.head);
    if (tries && threadIdx.x == 0) store_u32(at + share::kWindows, 2);
}

}  // namespace flash_kda
