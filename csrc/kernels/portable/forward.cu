// Kimi Delta Attention, forward, for every GPU from sm_90 on: mma.sync for the products, TMA for the bytes.
//
// Math: kernel notes, "chunked form". Per 16-token chunk, with the state S [V, K] in fp32 registers:
//     P = S [K~ ; Q~]^T      D = V^T - P_k      U = D T^T      O = P_q + U scores^T      S <- S A_C + U K-
// Grid: one block per (sequence, head), block index = sequence * H + head; one block per SM.
// Roles: warps 0-7 scan (each holds 16 rows of V of the state for the whole sequence); the next warps prepare, one chunk each, round robin;
// the last warp moves data (TMA loads into a slot, TMA stores of O out of it).
// A slot goes: full (tiles have landed) -> ready (prepared) -> done (consumed, O written over V) -> stored, loaded again.
// Shared memory (config.h): slots (slot.h), the head's gate bias, a scratch matrix per prepare warp, barriers, a flag per slot.
// Measured cost: docs/kernel-notes.md.

#include "kernels/common/prepare.cuh"
#include "kernels/portable/config.h"

namespace flash_kda::portable {

struct Maps {
    TensorMap q, k;     // box: one 64-channel panel x 16 tokens
    TensorMap v, g, o;  // box: two panels x 16 tokens
};

struct Chunks {
    int batch;   // row of [B, T]
    int first;   // first token in that row
    int tokens;  // of this sequence
    __device__ int count() const { return (tokens + kChunkTokens - 1) / kChunkTokens; }
    __device__ int valid(int chunk) const { return min(kChunkTokens, tokens - chunk * kChunkTokens); }
};

__device__ __forceinline__ Chunks sequence_chunks(const ForwardParams& p, int sequence) {
    if (p.cu_seqlens == nullptr) return {sequence, 0, p.T};
    long long first, last;
    if (p.cu_seqlens_is_int64) {
        const auto* offsets = static_cast<const long long*>(p.cu_seqlens);
        first = offsets[sequence], last = offsets[sequence + 1];
    } else {
        const auto* offsets = static_cast<const int*>(p.cu_seqlens);
        first = offsets[sequence], last = offsets[sequence + 1];
    }
    // The host cannot look at the offsets without waiting for the device: keep bad ones inside the tensors.
    const long long T = p.T;
    first = min(max(first, 0ll), T);
    last = min(max(last, first), T);
    return {0, static_cast<int>(first), static_cast<int>(last - first)};
}

template <class Config>
struct Pipeline {
    static constexpr int kStages = Config::kStages;
    uint32_t slots;
    Barrier* barriers;
    __device__ uint32_t slot(int chunk) const { return slots + (chunk % kStages) * slot::kBytes; }
    __device__ static uint32_t phase(int chunk) { return (chunk / kStages) & 1; }
    __device__ uint64_t* full(int chunk) const { return reinterpret_cast<uint64_t*>(barriers + chunk % kStages); }
    __device__ uint64_t* ready(int chunk) const { return reinterpret_cast<uint64_t*>(barriers + kStages + chunk % kStages); }
    __device__ uint64_t* done(int chunk) const { return reinterpret_cast<uint64_t*>(barriers + 2 * kStages + chunk % kStages); }
    __device__ uint32_t collinear(int chunk) const { return slots + Config::kFlagOffset + (chunk % kStages) * 4; }
};

// ---- move ----------------------------------------------------------------------------------------------------------------------------

template <class Config>
__device__ __forceinline__ void load_chunk(const Maps& maps, const Pipeline<Config>& pipe, const Chunks& chunks, int head, int chunk) {
    const uint32_t slot = pipe.slot(chunk);
    uint64_t* full = pipe.full(chunk);
    const int token = chunks.first + chunk * kChunkTokens;
    constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST);
    Barrier::arrive_and_expect_tx(full, slot::kLoadBytes);
    using Load = cute::SM90_TMA_LOAD_5D;
    // Coordinates: channel in panel, token, panel, head, batch row.
    for (int panel = 0; panel < 2; ++panel) {
        const uint32_t at = slot + panel * slot::kKeyQueryPanelStride;
        Load::copy(&maps.k, full, kHint, shared_pointer(at + slot::kKey), 0, token, panel, head, chunks.batch);
        Load::copy(&maps.q, full, kHint, shared_pointer(at + slot::kQuery), 0, token, panel, head, chunks.batch);
    }
    Load::copy(&maps.g, full, kHint, shared_pointer(slot + slot::kGate), 0, token, 0, head, chunks.batch);
    Load::copy(&maps.v, full, kHint, shared_pointer(slot + slot::kValue), 0, token, 0, head, chunks.batch);
}

// The last chunk of a sequence that is no multiple of 16: its missing rows belong to a neighbour.
__device__ __forceinline__ void store_tail(const ForwardParams& p, uint32_t out, const Chunks& chunks, int head, int chunk, int lane) {
    const int part = lane & 15;  // 16 bytes of a 256-byte row
    char* row0 = static_cast<char*>(p.out) +
                 2 * (chunks.batch * p.out_strides.batch + (chunks.first + chunk * kChunkTokens) * p.out_strides.token + head * p.out_strides.head);
    for (int row = lane >> 4; row < chunks.valid(chunk); row += 2) {
        const float4 x = load_float4(out + (part >> 3) * slot::kPanelStride + row * 128 + (((part & 7) ^ (row & 7)) << 4));
        *reinterpret_cast<float4*>(row0 + 2 * row * p.out_strides.token + part * 16) = x;
    }
}

template <class Config>
__device__ __forceinline__ void move(const ForwardParams& p, const Maps& maps, const Pipeline<Config>& pipe, const Chunks& chunks, int head, int lane) {
    const int count = chunks.count();
    if (lane == 0) {
        for (int chunk = 0; chunk < min(count, Config::kStages); ++chunk) load_chunk(maps, pipe, chunks, head, chunk);
    }
    for (int chunk = 0; chunk < count; ++chunk) {
        Barrier::wait(pipe.done(chunk), Pipeline<Config>::phase(chunk));
        const uint32_t out = pipe.slot(chunk) + slot::kOut;
        if (chunks.valid(chunk) < kChunkTokens) {
            store_tail(p, out, chunks, head, chunk, lane);
        } else if (lane == 0) {
            cute::SM90_TMA_STORE_5D::copy(&maps.o, shared_pointer(out), 0, chunks.first + chunk * kChunkTokens, 0, head, chunks.batch);
            cute::tma_store_arrive();
            // The slot before this one can be loaded again once at most the store just issued still reads shared memory.
            if (chunk > 0 && chunk - 1 + Config::kStages < count) {
                cute::tma_store_wait<1>();
                load_chunk(maps, pipe, chunks, head, chunk - 1 + Config::kStages);
            }
        }
        __syncwarp();
    }
    if (lane == 0) cute::tma_store_wait<0>();
}

// ---- prepare -------------------------------------------------------------------------------------------------------------------------

template <class Config>
__device__ __forceinline__ void prepare(const ForwardParams& p, const Pipeline<Config>& pipe, const Chunks& chunks, GateConstants gate, int head, uint32_t bias,
                                        uint32_t scratch, int warp, int lane) {
    const int count = chunks.count();
    for (int chunk = warp; chunk < count; chunk += Config::kPrepareWarps) {
        const int valid = chunks.valid(chunk);
        float beta = 0.f;
        if (lane < valid) {
            const long long at = chunks.batch * p.beta_strides.batch + (chunks.first + chunk * kChunkTokens + lane) * p.beta_strides.token +
                                 head * p.beta_strides.head;
            const uint32_t logit = static_cast<const unsigned short*>(p.beta)[at];
            beta = 1.f / (1.f + expf(-bf16_low(logit)));
        }
        Barrier::wait(pipe.full(chunk), Pipeline<Config>::phase(chunk));
        const bool collinear = prepare_chunk<kScratchStride>(pipe.slot(chunk), scratch, bias, gate, p.scale, beta, valid, lane);
        if (lane == 0) store_u32(pipe.collinear(chunk), collinear);
        // These generic writes precede TMA's next writes to the slot.
        cutlass::arch::fence_view_async_shared();
        __syncwarp();
        if (lane == 0) Barrier::arrive(pipe.ready(chunk));
    }
}

// ---- scan ----------------------------------------------------------------------------------------------------------------------------

// Fragment layout of the state: s[j] covers channels 8j..8j+7; this lane holds rows g, g+8 and columns 2c, 2c+1.
using State = float[16][4];

template <bool kFp32>
__device__ __forceinline__ float2 load_state_pair(const void* base, long long index) {
    if constexpr (kFp32) {
        return *reinterpret_cast<const float2*>(static_cast<const float*>(base) + index);
    } else {
        const uint32_t pair = *reinterpret_cast<const uint32_t*>(static_cast<const unsigned short*>(base) + index);
        return {bf16_low(pair), bf16_high(pair)};
    }
}

template <bool kFp32>
__device__ __forceinline__ void load_state(State& s, const void* base, long long index) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        const float2 low = load_state_pair<kFp32>(base, index + 8 * j), high = load_state_pair<kFp32>(base, index + 8 * j + 8 * kHeadDim);
        s[j][0] = low.x, s[j][1] = low.y, s[j][2] = high.x, s[j][3] = high.y;
    }
}

__device__ __forceinline__ void store_state(const State& s, void* base, bool fp32, long long index) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const long long at = index + 8 * j + r * 8 * kHeadDim;
            if (fp32) {
                *reinterpret_cast<float2*>(static_cast<float*>(base) + at) = {s[j][2 * r], s[j][2 * r + 1]};
            } else {
                *reinterpret_cast<uint32_t*>(static_cast<unsigned short*>(base) + at) = pack_bf16(s[j][2 * r], s[j][2 * r + 1]);
            }
        }
    }
}

// d += a * [t][s]^T for a 16x16 block matrix: columns 0-7 into d[0], 8-15 into d[1].
__device__ __forceinline__ void multiply_block_matrix(float (&d)[2][4], const uint32_t (&a)[4], const uint32_t (&blocks)[4]) {
    mma(d[0], a, blocks[0], blocks[1]);
    mma(d[1], a, blocks[2], blocks[3]);
}

__device__ __forceinline__ void pack_fragment(uint32_t (&a)[4], const float (&low)[4], const float (&high)[4]) {
    a[0] = pack_bf16(low[0], low[1]);
    a[1] = pack_bf16(low[2], low[3]);
    a[2] = pack_bf16(high[0], high[1]);
    a[3] = pack_bf16(high[2], high[3]);
}

// What rounding to bf16 left over, itself in bf16.
__device__ __forceinline__ void pack_fragment_rest(uint32_t (&rest)[4], const uint32_t (&a)[4], const float (&low)[4], const float (&high)[4]) {
    rest[0] = pack_bf16(low[0] - bf16_low(a[0]), low[1] - bf16_high(a[0]));
    rest[1] = pack_bf16(low[2] - bf16_low(a[1]), low[3] - bf16_high(a[1]));
    rest[2] = pack_bf16(high[0] - bf16_low(a[2]), high[1] - bf16_high(a[2]));
    rest[3] = pack_bf16(high[2] - bf16_low(a[3]), high[3] - bf16_high(a[3]));
}

template <class Config>
__device__ __forceinline__ void scan(const ForwardParams& p, const Pipeline<Config>& pipe, const Chunks& chunks, long long state_index, int warp, int lane) {
    const int c = lane & 3;
    const uint32_t fragment = fragment_offset(lane);
    // V and O, [t][v], the 16 columns of this warp: matrices (tokens 0-7, v 0-7), (0-7, 8-15), (8-15, 0-7), (8-15, 8-15).
    const uint32_t v_row = (lane & 7) + (lane >> 4) * 8;
    const uint32_t v_offset =
        (warp >> 2) * slot::kPanelStride + v_row * 128 + ((((warp & 3) * 2 + ((lane >> 3) & 1)) ^ (v_row & 7)) << 4);
    const long long index = state_index + (warp * 16 + (lane >> 2)) * kHeadDim + 2 * c;

    State s = {};
    if (p.initial_state != nullptr) {
        if (p.initial_is_fp32) {
            load_state<true>(s, p.initial_state, index);
        } else {
            load_state<false>(s, p.initial_state, index);
        }
    }

    const int count = chunks.count();
    for (int chunk = 0; chunk < count; ++chunk) {
        const uint32_t slot = pipe.slot(chunk);
        Barrier::wait(pipe.ready(chunk), Pipeline<Config>::phase(chunk));

        const BlockAddresses addresses(slot, fragment);
        float p_k[2][4] = {}, out[2][4] = {};  // S K~^T and S Q~^T: tokens 0-7, 8-15
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            uint32_t a[4], k[4], q[4];
            pack_fragment(a, s[2 * i], s[2 * i + 1]);
            load_matrices(k, addresses.key(i));
            load_matrices(q, addresses.query(i));
            mma(p_k[0], a, k[0], k[2]);
            mma(p_k[1], a, k[1], k[3]);
            mma(out[0], a, q[0], q[2]);
            mma(out[1], a, q[1], q[3]);
        }

        uint32_t v[4], high[4], low[4], scores[4];
        load_matrices_transposed(v, slot + slot::kValue + v_offset);
        load_matrices(high, slot + slot::kTransformHigh + lane * 16);
        load_matrices(low, slot + slot::kTransformLow + lane * 16);
        load_matrices(scores, slot + slot::kScores + lane * 16);
        __syncwarp();  // all of V is read before O is written over it
        float d[2][4], u[2][4] = {};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                d[h][2 * r] = bf16_low(v[2 * h + r]) - p_k[h][2 * r];
                d[h][2 * r + 1] = bf16_high(v[2 * h + r]) - p_k[h][2 * r + 1];
            }
        }
        uint32_t d_fragment[4], u_fragment[4];
        pack_fragment(d_fragment, d[0], d[1]);
        multiply_block_matrix(u, d_fragment, high);
        multiply_block_matrix(u, d_fragment, low);
        pack_fragment(u_fragment, u[0], u[1]);
        multiply_block_matrix(out, u_fragment, scores);

        // With near-equal keys the updates nearly cancel, and the roundings of 16 of them would add up to more than the sum: carry what
        // bf16 leaves of U as a second term there.
        const bool collinear = load_u32(pipe.collinear(chunk)) != 0;
        uint32_t u_rest[4];
        if (collinear) {
            pack_fragment_rest(u_rest, u_fragment, u[0], u[1]);
            multiply_block_matrix(out, u_rest, scores);
        }
        uint32_t o[4];
        pack_fragment(o, out[0], out[1]);
        store_matrices_transposed(slot + slot::kOut + v_offset, o);

#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float4 decay = load_float4(slot + slot::kDecay + i * 64 + c * 16);
            uint32_t k[4];
            load_matrices_transposed(k, addresses.key_minus(i));
            s[2 * i][0] *= decay.x, s[2 * i][1] *= decay.y, s[2 * i][2] *= decay.x, s[2 * i][3] *= decay.y;
            s[2 * i + 1][0] *= decay.z, s[2 * i + 1][1] *= decay.w, s[2 * i + 1][2] *= decay.z, s[2 * i + 1][3] *= decay.w;
            mma(s[2 * i], u_fragment, k[0], k[1]);
            mma(s[2 * i + 1], u_fragment, k[2], k[3]);
            if (collinear) {
                mma(s[2 * i], u_rest, k[0], k[1]);
                mma(s[2 * i + 1], u_rest, k[2], k[3]);
            }
        }
        cutlass::arch::fence_view_async_shared();  // O, for the TMA store
        __syncwarp();
        if (lane == 0) Barrier::arrive(pipe.done(chunk));
    }

    if (p.final_state != nullptr) store_state(s, p.final_state, p.final_is_fp32, index);
}

template <class Config>
__device__ __forceinline__ void forward(const ForwardParams& p, const Maps& maps) {
    extern __shared__ char dynamic_shared[];
    const uint32_t unaligned = cute::cast_smem_ptr_to_uint(dynamic_shared);
    const uint32_t base = (unaligned + slot::kAlignment - 1) & ~(slot::kAlignment - 1);
    const Pipeline<Config> pipe{base, reinterpret_cast<Barrier*>(shared_pointer(base + Config::kBarrierOffset))};
    const uint32_t bias = base + Config::kBiasOffset;

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int sequence = blockIdx.x / p.H, head = blockIdx.x % p.H;
    const Chunks chunks = sequence_chunks(p, sequence);
    const GateConstants gate = gate_constants(p, head);

    if (threadIdx.x == 0) {
        for (int stage = 0; stage < Config::kStages; ++stage) {
            Barrier::init(pipe.full(stage), 1);
            Barrier::init(pipe.ready(stage), 1);
            Barrier::init(pipe.done(stage), kScanWarps);
        }
        cutlass::arch::fence_barrier_init();
    }
    if (threadIdx.x < kHeadDim) {
        *reinterpret_cast<float*>(shared_pointer(bias + threadIdx.x * 4)) = gate_bias(gate, p.dt_bias[head * kHeadDim + threadIdx.x]);
    }
    __syncthreads();

    if (warp < kScanWarps) {
        scan(p, pipe, chunks, static_cast<long long>(blockIdx.x) * kHeadDim * kHeadDim, warp, lane);
    } else if (warp < kScanWarps + Config::kPrepareWarps) {
        const int prepare_warp = warp - kScanWarps;
        prepare(p, pipe, chunks, gate, head, bias, base + Config::kScratchOffset + prepare_warp * kScratchBytes, prepare_warp, lane);
    } else {
        move(p, maps, pipe, chunks, head, lane);
    }
}

}  // namespace flash_kda::portable

extern "C" __global__ void __launch_bounds__(flash_kda::portable::Wide::kThreads, 1)
    flash_kda_forward_portable_wide(const __grid_constant__ flash_kda::ForwardParams p, const __grid_constant__ flash_kda::portable::Maps maps) {
    flash_kda::portable::forward<flash_kda::portable::Wide>(p, maps);
}

extern "C" __global__ void __launch_bounds__(flash_kda::portable::Narrow::kThreads, 1)
    flash_kda_forward_portable_narrow(const __grid_constant__ flash_kda::ForwardParams p, const __grid_constant__ flash_kda::portable::Maps maps) {
    flash_kda::portable::forward<flash_kda::portable::Narrow>(p, maps);
}
