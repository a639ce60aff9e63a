// The state S [V, K] in fp32 registers, and the small products of the state step.
#pragma once

#include "kernels/common/pipeline.cuh"
#include "kernels/common/tile.cuh"

namespace flash_kda {

// One warp's 16 rows of V. s[j] covers channels 8j..8j+7; with g = lane/4 and c = lane%4 a lane holds rows g, g+8 and columns 2c, 2c+1: an
// mma accumulator, and as consecutive registers a wgmma accumulator.
using State = float[16][4];

// `at`: this lane's first element of the state in memory, as state_element finds it. All others lie at constant distances, which the instructions take as
// immediates.
template <class Element>
__device__ __forceinline__ void load_state(State& s, const Element* at) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const Element* pair = at + 8 * j + r * 8 * kHeadDim;
            if constexpr (sizeof(Element) == 4) {
                const float2 x = *reinterpret_cast<const float2*>(pair);
                s[j][2 * r] = x.x, s[j][2 * r + 1] = x.y;
            } else {
                const uint32_t x = *reinterpret_cast<const uint32_t*>(pair);
                s[j][2 * r] = bf16_low(x), s[j][2 * r + 1] = bf16_high(x);
            }
        }
    }
}

template <class Element>
__device__ __forceinline__ void store_state(const State& s, Element* at) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            Element* pair = at + 8 * j + r * 8 * kHeadDim;
            if constexpr (sizeof(Element) == 4) {
                *reinterpret_cast<float2*>(pair) = {s[j][2 * r], s[j][2 * r + 1]};
            } else {
                *reinterpret_cast<uint32_t*>(pair) = pack_bf16(s[j][2 * r], s[j][2 * r + 1]);
            }
        }
    }
}

// [K, V]: one by one, eight lanes beside one another.
__device__ __forceinline__ constexpr int key_first_offset(int j, int r) {
    return (8 * j + (r & 1)) * kHeadDim + 8 * (r >> 1);
}

template <class Element>
__device__ __forceinline__ void load_state_key_first(State& s, const Element* at) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            if constexpr (sizeof(Element) == 4) {
                s[j][r] = at[key_first_offset(j, r)];
            } else {
                s[j][r] = bf16_low(at[key_first_offset(j, r)]);
            }
        }
    }
}

template <class Element>
__device__ __forceinline__ void store_state_key_first(const State& s, Element* at) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            if constexpr (sizeof(Element) == 4) {
                at[key_first_offset(j, r)] = s[j][r];
            } else {
                at[key_first_offset(j, r)] = static_cast<unsigned short>(pack_bf16(s[j][r], 0.f));
            }
        }
    }
}

// d += a scores^T, given the blocks of the scores: tokens 0-7 into d[0], 8-15 into d[1].
__device__ __forceinline__ void multiply_scores(float (&d)[2][4], const uint32_t (&a)[4], const uint32_t (&blocks)[4]) {
    mma_k8(d[0], a[0], a[1], blocks[0]);
    mma(d[1], a, blocks[2], blocks[3]);
}

// T of a slot: of each block row g, columns 2c and 2c+1.
struct Transform {
    float2 blocks[3];

    __device__ __forceinline__ void load(uint32_t slot, int lane) {
#pragma unroll
        for (int i = 0; i < 3; ++i) blocks[i] = load_float2(slot + slot::kTransform + i * slot::kTransformBlockBytes + lane * 8);
    }
    // D T^T, of which the tensor cores take 10 bits of the mantissa. Inner tokens are taken in another order (k = c is token 2c, k = c+4 token 2c+1), for an
    // accumulator is then an operand as it is.
    __device__ __forceinline__ void multiply(float (&u)[2][4], const float (&d)[2][4]) const {
        const auto add = [](float (&u)[4], const float (&d)[4], const float2& t) {
            const uint32_t a[4] = {__float_as_uint(d[0]), __float_as_uint(d[2]), __float_as_uint(d[1]), __float_as_uint(d[3])};
            mma_tf32(u, a, __float_as_uint(t.x), __float_as_uint(t.y));
        };
        float rest[4] = {};  // by itself, for a product that hangs on another waits for the tensor cores twice
        add(u[0], d[0], blocks[0]), add(u[1], d[0], blocks[1]), add(rest, d[1], blocks[2]);
#pragma unroll
        for (int r = 0; r < 4; ++r) u[1][r] += rest[r];
    }
};

__device__ __forceinline__ void pack_fragment(uint32_t (&a)[4], const float (&low)[4], const float (&high)[4]) {
    a[0] = pack_bf16(low[0], low[1]);
    a[1] = pack_bf16(low[2], low[3]);
    a[2] = pack_bf16(high[0], high[1]);
    a[3] = pack_bf16(high[2], high[3]);
}

// What rounding to bf16 left over, itself in bf16. With near-equal keys the updates of a chunk nearly cancel, and the roundings of 16 of them
// would add up to more than their sum: there the state and O take this second term of U too.
__device__ __forceinline__ void pack_fragment_rest(uint32_t (&rest)[4], const uint32_t (&a)[4], const float (&low)[4], const float (&high)[4]) {
    rest[0] = pack_bf16(low[0] - bf16_low(a[0]), low[1] - bf16_high(a[0]));
    rest[1] = pack_bf16(low[2] - bf16_low(a[1]), low[3] - bf16_high(a[1]));
    rest[2] = pack_bf16(high[0] - bf16_low(a[2]), high[1] - bf16_high(a[2]));
    rest[3] = pack_bf16(high[2] - bf16_low(a[3]), high[3] - bf16_high(a[3]));
}

// The decays of 16-channel block i of the eight, as the lane's columns want them, and those columns of the state times them.
__device__ __forceinline__ float4 load_decay(uint32_t slot, int i, int lane) {
    return load_float4(slot + slot::kDecay + i * 64 + (lane & 3) * 16);
}

__device__ __forceinline__ void decay_block(State& s, int i, const float4& a) {
    s[2 * i][0] *= a.x, s[2 * i][1] *= a.y, s[2 * i][2] *= a.x, s[2 * i][3] *= a.y;
    s[2 * i + 1][0] *= a.z, s[2 * i + 1][1] *= a.w, s[2 * i + 1][2] *= a.z, s[2 * i + 1][3] *= a.w;
}

// s += a K-, by mma.sync.
__device__ __forceinline__ void add_key_minus(State& s, const uint32_t (&a)[4], const BlockAddresses& addresses) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        uint32_t k[4];
        load_matrices_transposed(k, addresses.key_minus(i));
        mma(s[2 * i], a, k[0], k[1]);
        mma(s[2 * i + 1], a, k[2], k[3]);
    }
}

// Where this lane addresses its scan warp's 16 columns of V, and of O, as four 8x8 matrices of [t][v]:
// (tokens 0-7, v 0-7), (0-7, 8-15), (8-15, 0-7), (8-15, 8-15).
__device__ __forceinline__ uint32_t value_offset(int warp, int lane) {
    const uint32_t row = (lane & 7) + (lane >> 4) * 8;
    return (warp >> 2) * slot::kPanelStride + row * 128 + ((((warp & 3) * 2 + ((lane >> 3) & 1)) ^ (row & 7)) << 4);
}

// A lane's first element of its warp's 16 rows of V, in a state [V, K] or, with keys first, [K, V]. Hidden from the compiler, which would otherwise find
// the address of each element anew.
template <class Element>
__device__ __forceinline__ Element* state_element(const StatePlace& place, int rows, int lane) {
    const int row = rows * 16 + (lane >> 2), column = 2 * (lane & 3);
    const long long index = static_cast<long long>(place.number) * kHeadDim * kHeadDim;
    Element* at =
        static_cast<Element*>(const_cast<void*>(place.base)) + index + (place.key_first ? column * kHeadDim + row : row * kHeadDim + column);
    asm volatile("" : "+l"(at));
    return at;
}

// 16 rows of V of the state at a place; from nowhere, zero or, for a transition, the identity.
__device__ __forceinline__ void start_state(State& s, const StatePlace& place, bool identity, int rows, int lane) {
    if (place.base == nullptr || identity) {
        const int column = identity ? rows * 16 + (lane >> 2) - 2 * (lane & 3) : -1;  // of this lane's first 1 in row g, less its own column offset
#pragma unroll
        for (int j = 0; j < 16; ++j) {
#pragma unroll
            for (int r = 0; r < 4; ++r) s[j][r] = 8 * j + (r & 1) == column + 8 * (r >> 1) ? 1.f : 0.f;
        }
        return;
    }
    if (place.fp32) {
        const float* at = state_element<float>(place, rows, lane);
        place.key_first ? load_state_key_first(s, at) : load_state(s, at);
    } else {
        const auto* at = state_element<unsigned short>(place, rows, lane);
        place.key_first ? load_state_key_first(s, at) : load_state(s, at);
    }
}

// The form of a place, which the compiler then knows to be the same in the whole warp: behind a branch that may part the lanes it would no longer keep the
// scan's place in uniform registers.
__device__ __forceinline__ int form_of(const StatePlace& place) {
    return uniform(place.base == nullptr ? -1 : (place.fp32 ? 1 : 0) + (place.key_first ? 2 : 0));
}

__device__ __forceinline__ void save_state(const State& s, const StatePlace& place, int rows, int lane) {
    const int form = form_of(place);
    if (form == 1) store_state(s, state_element<float>(place, rows, lane));
    if (form == 3) store_state_key_first(s, state_element<float>(place, rows, lane));
    if (form == 0) store_state(s, state_element<unsigned short>(place, rows, lane));
    if (form == 2) store_state_key_first(s, state_element<unsigned short>(place, rows, lane));
}

}  // namespace flash_kda
