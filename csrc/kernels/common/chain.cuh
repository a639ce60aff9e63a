// The products that chain states (segments.cuh): S P + B for states in memory, fp32; P transposed, [K', K]. They are done in tf32: 2^-12 of
// what a state carries over a boundary is far below the roundings of one chunk.
//
// Inner channels are taken in another order, so that both operands come as 16-byte words: with c = lane%4, k = c and c+4 of a first mma are channels 4c and 4c+1
// of 16, of a second one 4c+2 and 4c+3. What all scan warps read goes through an exchange: in shared memory where there is room, else in global memory.
#pragma once

#include "kernels/common/segments.cuh"
#include "kernels/common/state.cuh"

namespace flash_kda {

inline constexpr long long kStateElements = kHeadDim * kHeadDim;

// Channels 4 `quad` to 4 `quad` + 3 of row `row`.
__device__ __forceinline__ float4 load_quad(const float* array, int stride, int row, int quad) {
    return *reinterpret_cast<const float4*>(array + row * stride + 4 * quad);
}

// Channels 16 i to 16 i + 15 of rows g and g+8.
struct RowQuads {
    float4 low, high;

    __device__ __forceinline__ void load(const float* rows, int stride, int i, int lane) {
        low = load_quad(rows, stride, lane >> 2, 4 * i + (lane & 3)), high = load_quad(rows, stride, (lane >> 2) + 8, 4 * i + (lane & 3));
    }
    // Both operands' mean loss is made up for here.
    __device__ __forceinline__ void operands(uint32_t (&a)[2][4]) const {
        constexpr float kGain = kCutToTf32 * kCutToTf32;
        const float x[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
#pragma unroll
        for (int step = 0; step < 2; ++step) {
#pragma unroll
            for (int r = 0; r < 4; ++r) a[step][r] = __float_as_uint(x[step][r] * kGain);
        }
    }
};

// A signal of all scan warps: what they wrote before is there for whoever sees it.
__device__ __forceinline__ void signal_together(unsigned long long* flag, unsigned long long value) {
    __threadfence();
    any_scan_warp(false);
    publish(flag, value, threadIdx.x == 0);
}

// The states after stretches, rows 16 `rows` and on of V, by all scan warps, 16 columns each. The rows pass from stretch to stretch in the exchange, at a stride
// that keeps 16-byte words of two of them in different banks. What does not depend on the stretch before is fetched as soon as there are registers for it.
__device__ __forceinline__ void chain_rows(const ForwardParams& p, const Cut& cut, int rows, float* exchange) {
    constexpr int kStride = kHeadDim + 16;
    static_assert(kExchangeBytes >= 16 * kStride * 4);
    const int lane = fresh_lane(), g = lane >> 2, c = lane & 3, column = 16 * (threadIdx.x / 32);
    const int count = stretch_count(p.segments) - 1;
    if (count < 2) return;
    const auto of_stretch = [&](float* states, int stretch) { return states + cut.block(stretch) * kStateElements; };
    // This lane's elements, as mma wants them: rows g and g+8, columns 2c and 2c+1 of eight.
    const auto load = [&](float (&d)[2][4], int stretch) {
        const float* at = of_stretch(p.stretch_states, stretch) + (16 * rows + g) * kHeadDim + column + 2 * c;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float2 low = *reinterpret_cast<const float2*>(at + 8 * half), high = *reinterpret_cast<const float2*>(at + 8 * half + 8 * kHeadDim);
            d[half][0] = low.x, d[half][1] = low.y, d[half][2] = high.x, d[half][3] = high.y;
        }
    };
    const auto store = [&](const float (&d)[2][4], float* at, int stride) {
        at += g * stride + column + 2 * c;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            *reinterpret_cast<float2*>(at + 8 * half) = {d[half][0], d[half][1]};
            *reinterpret_cast<float2*>(at + 8 * half + 8 * stride) = {d[half][2], d[half][3]};
        }
    };
    float4 columns[2][8];
    const auto load_columns = [&](int half, int stretch) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            columns[half][i] = load_quad(of_stretch(p.stretch_transitions, stretch), kHeadDim, column + 8 * half + g, 4 * i + c);
    };
    float before[2][4], next[2][4];
    load(before, 0), load(next, 1), load_columns(0, 1), load_columns(1, 1);
#pragma unroll 1
    for (int stretch = 1; stretch < count; ++stretch) {
        store(before, exchange, kStride);
        any_scan_warp(false);  // the rows before are complete
        const bool more = stretch + 1 < count;
        float other[2][4] = {};  // independent sums, for a product takes its time
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            RowQuads quads;
            quads.load(exchange, kStride, i, lane);
            uint32_t a[2][4];
            quads.operands(a);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                mma_tf32(next[half], a[0], __float_as_uint(columns[half][i].x), __float_as_uint(columns[half][i].y));
                mma_tf32(other[half], a[1], __float_as_uint(columns[half][i].z), __float_as_uint(columns[half][i].w));
            }
        }
        if (more) load_columns(0, stretch + 1), load_columns(1, stretch + 1);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int r = 0; r < 4; ++r) before[half][r] = next[half][r] + other[half][r];
        }
        if (more) load(next, stretch + 1);
        store(before, of_stretch(p.stretch_states, stretch) + 16 * rows * kHeadDim, kHeadDim);
        any_scan_warp(false);  // and have been read
    }
}

// 16 rows of V of the state at the start of this block's segment, by each scan warp: what its stretch makes of zero, which is there, and what it makes of the
// state before. The warps bring P for one another, 16 inner channels at a time: [128][16] in the exchange.
__device__ __forceinline__ void chain_start(State& s, const ForwardParams& p, const Cut& cut, float* exchange) {
    static_assert(kExchangeBytes >= kHeadDim * 16 * 4);
    constexpr int kAhead = 2;  // times 16 channels
    const int warp = threadIdx.x / 32, lane = fresh_lane(), g = lane >> 2, c = lane & 3;
    const int stretch = static_cast<int>((segment_begin(p, cut.segment) - 1) / p.stretch_tokens);  // that leads up to the segment
    const bool chained = cut.segment > 0 && stretch > 0;
    const float* transposed = p.segment_transitions + cut.block(cut.segment) * kStateElements;
    float4 columns[kAhead][2];
    const auto load_columns = [&](int ahead, int i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) columns[ahead][half] = load_quad(transposed, kHeadDim, 64 * half + 8 * warp + g, 4 * i + c);
    };
    if (chained) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) load_columns(i, i);
    }
    start_state(s, {p.segment_states, cut.block(cut.segment), true}, false, warp, lane);
    signal::await(p, signal::chained(p, cut, warp));
    if (!chained) return;

    const float* before = p.stretch_states + cut.block(stretch - 1) * kStateElements + warp * 16 * kHeadDim;
    RowQuads rows[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) rows[i].load(before, kHeadDim, i, lane);
#pragma unroll 1
    for (int first = 0; first < kHeadDim / 16; first += kAhead) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) *reinterpret_cast<float4*>(exchange + (64 * half + 8 * warp + g) * 16 + 4 * c) = columns[i][half];
            uint32_t a[2][4];
            rows[i].operands(a);
            if (first + kAhead < kHeadDim / 16) load_columns(i, first + kAhead + i), rows[i].load(before, kHeadDim, first + kAhead + i, lane);
            any_scan_warp(false);  // all columns are there
#pragma unroll
            for (int j = 0; j < 16; j += 8) {  // enough that no product waits for one before
                float4 quads[8];
#pragma unroll
                for (int n = 0; n < 8; ++n) quads[n] = load_quad(exchange, 16, 8 * (j + n) + g, c);
#pragma unroll
                for (int n = 0; n < 8; ++n) mma_tf32(s[j + n], a[0], __float_as_uint(quads[n].x), __float_as_uint(quads[n].y));
#pragma unroll
                for (int n = 0; n < 8; ++n) mma_tf32(s[j + n], a[1], __float_as_uint(quads[n].z), __float_as_uint(quads[n].w));
            }
            any_scan_warp(false);  // and have been read
        }
    }
}

// By all scan warps, after their scans for states: waits for those of the other blocks; then the state is that at the start of this block's segment.
__device__ __forceinline__ void chain_states(State& s, const ForwardParams& p, const Cut& cut, float* exchange) {
    signal_together(signal::of(p, cut, cut.segment, signal::kScanned), signal::value(p));
    signal::await_all(p, cut, signal::kScanned);
    for (int rows = cut.segment; rows < kScanWarps; rows += p.segments) {
        chain_rows(p, cut, rows, exchange);
        signal_together(signal::chained(p, cut, rows), signal::value(p));
    }
    chain_start(s, p, cut, exchange);
    signal_together(signal::of(p, cut, cut.segment, signal::kEnded), signal::value(p));
}

}  // namespace flash_kda
