// Gates: how the log2-decay of a token follows from g.
//
//   bounded       G = bound * sigmoid(a (g + dt_bias))        a = exp(A_log)
//   unbounded     G = -a log2(1 + e^(g + dt_bias))            softplus(x) = ln(1 + e^x), in units of ln 2
//   log-decay     G = g / ln 2, at most 0
//
// All below is minus G. Nothing decays by more than 2^-128 a token: that is zero in fp32, and sums of 16 keep their digits.
#pragma once

#include "kernels/common/ptx.cuh"

namespace flash_kda {

inline constexpr float kLog2E = 1.44269504088896340736f;
// The tensor cores, which sum the log-decays, cut them to tf32: 0.72 * 2^-11 is what they lose on average.
inline constexpr float kCutToTf32 = 1.f + 0.7213f / 2048.f;
inline constexpr float kMostDecay = 128.f;

// Per-head constants. Bounded: minus G is 1 / (floor + 2^(slope*g + bias)) with floor = -1/bound and bias[ch] = slope*dt_bias[ch] + log2(floor).
// Else slope is a factor on minus G, and bias[ch] = dt_bias[ch] / ln 2. The biases lie in shared memory.
struct GateConstants {
    float slope;
    float floor;
};

__device__ __forceinline__ GateConstants gate_constants(const ForwardParams& p, int head) {
    // exp(A_log) beyond 1e30 cannot change a sigmoid but could turn 0 * inf into NaN. (Not fminf, which would hide a NaN.)
    float a = p.A_log == nullptr ? 1.f : expf(p.A_log[head]);
    a = a > 1e30f ? 1e30f : a;
    if (p.gate != Gate::kBounded) return {(p.gate == Gate::kUnbounded ? a : kLog2E) * kCutToTf32, 0.f};
    const float bound = fminf(p.lower_bound, -1e-30f) * (kLog2E * kCutToTf32);  // one nearer to zero decays nothing in fp32
    return {-a * kLog2E, reciprocal_approx(-bound)};
}

__device__ __forceinline__ float gate_bias(const ForwardParams& p, const GateConstants& gate, int head, int channel) {
    const float slope = p.gate == Gate::kBounded ? gate.slope : kLog2E, shift = p.gate == Gate::kBounded ? log2f(gate.floor) : 0.f;
    // Finite, so that slope*g + bias is never inf - inf.
    const float x = p.dt_bias == nullptr ? 0.f : slope * p.dt_bias[head * kHeadDim + channel];
    return (x < -1e38f ? -1e38f : x > 1e38f ? 1e38f : x) + shift;
}

__device__ __forceinline__ void store_gate_bias(uint32_t bias, const ForwardParams& p, const GateConstants& gate, int head, int lane) {
#pragma unroll
    for (int channel = lane; channel < kHeadDim; channel += 32) store_float(bias + channel * 4, gate_bias(p, gate, head, channel));
    __syncwarp();
}

__device__ __forceinline__ float bounded_decay(float g, float bias, const GateConstants& gate) {
    return reciprocal_approx(gate.floor + exp2_approx(fmaf(g, gate.slope, bias)));
}

// At most kMostDecay; a NaN stays one.
__device__ __forceinline__ float limited_decay(float x) {
    return x > kMostDecay ? kMostDecay : x;
}

__device__ __forceinline__ float unbounded_decay(float g, float bias, const GateConstants& gate) {
    const float y = fmaf(g, kLog2E, bias), z = exp2_approx(y);
    // log2(1 + z): three terms of the series keep the digits of a small z, and a large one is left out of the sum before it overflows.
    const float series = z * kLog2E * fmaf(z, fmaf(z, 0.33333333f, -0.5f), 1.f);
    const float softplus = y > 24.f ? y : z < 0.0078125f ? series : log2_approx(1.f + z);
    return limited_decay(gate.slope * softplus);
}

__device__ __forceinline__ float given_decay(float g, const GateConstants& gate) {
    const float x = -g * gate.slope;
    return limited_decay(x < 0.f ? 0.f : x);
}

}  // namespace flash_kda
