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

// A place in the ring: the slot of one chunk and its barriers.
template <class Config>
struct Place {
    uint32_t base;  // of shared memory
    int stage;
    uint32_t phase;

    __device__ __forceinline__ uint32_t slot() const { return base + stage * slot::kBytes; }
    __device__ __forceinline__ uint32_t full() const { return base + Config::kBarrierOffset + stage * 8; }
    __device__ __forceinline__ uint32_t ready() const { return full() + Config::kStages * 8; }
    __device__ __forceinline__ uint32_t done() const { return full() + 2 * Config::kStages * 8; }
    __device__ __forceinline__ uint32_t collinear() const { return base + Config::kFlagOffset + stage * 4; }
    // `chunks` onward, at most one turn.
    __device__ __forceinline__ void advance(int chunks = 1) {
        stage += chunks;
        if (stage >= Config::kStages) stage -= Config::kStages, phase ^= 1;
    }
};

// ---- move ----------------------------------------------------------------------------------------------------------------------------

template <class Config>
__device__ __forceinline__ void load_chunk(const Maps& maps, const Place<Config>& place, const Chunks& chunks, int head, int chunk) {
    const uint32_t slot = place.slot();
    const int token = chunks.first + chunk * kChunkTokens;
    auto* full = reinterpret_cast<uint64_t*>(shared_pointer(place.full()));
    constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST);
    barrier_expect_bytes(place.full(), slot::kLoadBytes);
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
__device__ __forceinline__ void move(const ForwardParams& p, const Maps& maps, uint32_t base, const Chunks& chunks, int head, int lane) {
    const int count = chunks.count();
    const bool elected = cute::elect_one_sync();
    Place<Config> load{base, 0, 0};
    int loaded = 0;
    for (; loaded < min(count, Config::kStages); ++loaded, load.advance()) {
        if (elected) load_chunk(maps, load, chunks, head, loaded);
    }
    Place<Config> place{base, 0, 0};
    for (int chunk = 0; chunk < count; ++chunk, place.advance()) {
        barrier_wait(place.done(), place.phase);
        const uint32_t out = place.slot() + slot::kOut;
        if (chunks.valid(chunk) < kChunkTokens) {
            store_tail(p, out, chunks, head, chunk, lane);
            break;  // the last one
        }
        if (elected) {
            cute::SM90_TMA_STORE_5D::copy(&maps.o, shared_pointer(out), 0, chunks.first + chunk * kChunkTokens, 0, head, chunks.batch);
            cute::tma_store_arrive();
        }
        // The slot before this one can be loaded again once at most the store just issued still reads shared memory.
        if (chunk > 0 && loaded < count) {
            if (elected) {
                cute::tma_store_wait<1>();
                load_chunk(maps, load, chunks, head, loaded);
            }
            ++loaded, load.advance();
        }
    }
    if (elected) cute::tma_store_wait<0>();
}

// ---- prepare -------------------------------------------------------------------------------------------------------------------------

template <class Config>
__device__ __forceinline__ void prepare(const ForwardParams& p, uint32_t base, const Chunks& chunks, GateConstants gate, int head, int warp,
                                        int lane) {
    const uint32_t bias = base + Config::kBiasOffset, scratch = base + Config::kScratchOffset + warp * kScratchBytes;
    const int count = chunks.count();
    // Lane t's logit of a chunk, 0 past the end; fetched one round ahead, for it comes straight from memory.
    const auto load_logit = [&](int chunk) -> uint32_t {
        const int token = chunk * kChunkTokens + lane;
        if (lane >= kChunkTokens || token >= chunks.tokens) return 0;
        const long long at = chunks.batch * p.beta_strides.batch + (chunks.first + token) * p.beta_strides.token + head * p.beta_strides.head;
        return static_cast<const unsigned short*>(p.beta)[at];
    };
    uint32_t next_logit = load_logit(warp);
    Place<Config> place{base, 0, 0};
    place.advance(warp);
    for (int chunk = warp; chunk < count; chunk += Config::kPrepareWarps, place.advance(Config::kPrepareWarps)) {
        const int valid = chunks.valid(chunk);
        const float logit = bf16_low(next_logit);
        next_logit = load_logit(chunk + Config::kPrepareWarps);
        const float beta = lane < valid ? reciprocal_approx(1.f + exp2_approx(-1.44269504f * logit)) : 0.f;
        barrier_wait(place.full(), place.phase);
        const bool collinear = prepare_chunk(place.slot(), scratch, bias, gate, p.scale, beta, valid, lane);
        store_u32(place.collinear(), collinear);
        // These generic writes precede the copy engine's next writes to the slot, and wgmma's reads of it.
        cutlass::arch::fence_view_async_shared();
        __syncwarp();
        if (cute::elect_one_sync()) barrier_arrive(place.ready());
    }
}

// ---- block ---------------------------------------------------------------------------------------------------------------------------

// Everything before the roles part: addresses, barriers, the gate's bias table, the sequence's bounds. Ends with a block-wide barrier.
template <class Config>
struct Block {
    uint32_t base;  // shared memory, 1024-byte aligned
    int warp, lane;

    __device__ __forceinline__ explicit Block(const ForwardParams& p) {
        extern __shared__ char dynamic_shared[];
        const uint32_t unaligned = cute::cast_smem_ptr_to_uint(dynamic_shared);
        base = (unaligned + slot::kAlignment - 1) & ~(slot::kAlignment - 1);
        warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
        if (threadIdx.x == 0) {
            *chunks_address() = sequence_chunks(p, blockIdx.x / p.H);
            for (Place<Config> place{base, 0, 0}; place.phase == 0; place.advance()) {
                barrier_init(place.full(), 1);
                barrier_init(place.ready(), 1);
                barrier_init(place.done(), kScanWarps);
            }
            cutlass::arch::fence_barrier_init();
        }
        if (threadIdx.x < kHeadDim) {
            const int head = blockIdx.x % p.H;
            store_float(base + Config::kBiasOffset + threadIdx.x * 4, gate_bias(gate_constants(p, head), p.dt_bias[head * kHeadDim + threadIdx.x]));
        }
        __syncthreads();
    }

    __device__ __forceinline__ Chunks* chunks_address() const { return reinterpret_cast<Chunks*>(shared_pointer(base + Config::kChunksOffset)); }
    // Read where it is needed, so that no register holds it meanwhile.
    __device__ __forceinline__ Chunks chunks() const {
        const Chunks& chunks = *chunks_address();
        return {uniform(chunks.batch), uniform(chunks.first), uniform(chunks.tokens)};
    }

    // The roles of the warps after the scan warps.
    __device__ __forceinline__ void feed(const ForwardParams& p, const Maps& maps) const {
        const int helper = warp - kScanWarps, head = blockIdx.x % p.H;
        if (helper < Config::kPrepareWarps) {
            prepare<Config>(p, base, chunks(), gate_constants(p, head), head, helper, lane);
        } else if (helper == Config::kPrepareWarps) {
            move<Config>(p, maps, base, chunks(), head, lane);
        }
    }

    // Offset in elements of this block's state.
    __device__ __forceinline__ long long state_index() const { return static_cast<long long>(blockIdx.x) * kHeadDim * kHeadDim; }
};

}  // namespace flash_kda
