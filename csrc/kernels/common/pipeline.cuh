// What every forward kernel shares: the block's sequence, the ring of slots, and the roles that feed and drain it.
//
// A slot goes: full (tiles have landed) -> ready (prepared) -> done (consumed, O written over V) -> stored, loaded again.
// Prepare warps take chunks round robin; one warp moves data; what scans the state is each kernel's own.
#pragma once

#include "kernels/common/prepare.cuh"
#include "kernels/common/ring.h"

namespace flash_kda {

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
        const bool collinear = prepare_chunk(pipe.slot(chunk), scratch, bias, gate, p.scale, beta, valid, lane);
        if (lane == 0) store_u32(pipe.collinear(chunk), collinear);
        // These generic writes precede TMA's next writes to the slot.
        cutlass::arch::fence_view_async_shared();
        __syncwarp();
        if (lane == 0) Barrier::arrive(pipe.ready(chunk));
    }
}

// ---- block ---------------------------------------------------------------------------------------------------------------------------

// Everything before the roles part: addresses, barriers, the gate's bias table. Ends with a block-wide barrier.
template <class Config>
struct Block {
    Pipeline<Config> pipe;
    Chunks chunks;
    GateConstants gate;
    uint32_t base;  // shared memory, 1024-byte aligned
    int head, warp, lane;

    __device__ __forceinline__ explicit Block(const ForwardParams& p) {
        extern __shared__ char dynamic_shared[];
        const uint32_t unaligned = cute::cast_smem_ptr_to_uint(dynamic_shared);
        base = (unaligned + slot::kAlignment - 1) & ~(slot::kAlignment - 1);
        pipe = {base, reinterpret_cast<Barrier*>(shared_pointer(base + Config::kBarrierOffset))};
        warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        head = blockIdx.x % p.H;
        chunks = sequence_chunks(p, blockIdx.x / p.H);
        gate = gate_constants(p, head);
        if (threadIdx.x == 0) {
            for (int stage = 0; stage < Config::kStages; ++stage) {
                Barrier::init(pipe.full(stage), 1);
                Barrier::init(pipe.ready(stage), 1);
                Barrier::init(pipe.done(stage), kScanWarps);
            }
            cutlass::arch::fence_barrier_init();
        }
        if (threadIdx.x < kHeadDim) {
            *reinterpret_cast<float*>(shared_pointer(base + Config::kBiasOffset + threadIdx.x * 4)) =
                gate_bias(gate, p.dt_bias[head * kHeadDim + threadIdx.x]);
        }
        __syncthreads();
    }

    // The roles of the warps after the scan warps.
    __device__ __forceinline__ void feed(const ForwardParams& p, const Maps& maps) const {
        const int helper = warp - kScanWarps;
        if (helper < Config::kPrepareWarps) {
            prepare(p, pipe, chunks, gate, head, base + Config::kBiasOffset, base + Config::kScratchOffset + helper * kScratchBytes, helper, lane);
        } else if (helper == Config::kPrepareWarps) {
            move(p, maps, pipe, chunks, head, lane);
        }
    }

    // Offset in elements of this block's state.
    __device__ __forceinline__ long long state_index() const { return static_cast<long long>(blockIdx.x) * kHeadDim * kHeadDim; }
};

}  // namespace flash_kda
