// What every forward kernel shares: a block's items, the ring of slots, and the roles that feed and drain it. The roles run ahead of one
// another as far as the ring lets them, also from one item into the next.
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

// One sequence of one head, or a segment of one: what a block works through from an initial to a final state.
struct Item {
    int sequence, head;
    int batch;  // row of [B, T]
    int first;  // first token in that row
    int tokens;
    int segment = 0;
    bool transition = false;  // find P: start from the identity, v = 0
    __device__ __forceinline__ int count() const { return (tokens + kChunkTokens - 1) / kChunkTokens; }
    __device__ __forceinline__ int valid(int chunk) const { return min(kChunkTokens, tokens - chunk * kChunkTokens); }
};

// The host cannot look at the offsets without waiting for the device: bad ones are kept inside the tensors here.
__device__ __forceinline__ int2 sequence_bounds(const ForwardParams& p, int sequence) {
    long long first, last;
    if (p.cu_seqlens_is_int64) {
        const auto* offsets = static_cast<const long long*>(p.cu_seqlens);
        first = offsets[sequence], last = offsets[sequence + 1];
    } else {
        const auto* offsets = static_cast<const int*>(p.cu_seqlens);
        first = offsets[sequence], last = offsets[sequence + 1];
    }
    const long long T = p.T;
    first = min(max(first, 0ll), T);
    last = min(max(last, first), T);
    return {static_cast<int>(first), static_cast<int>(last)};
}

__device__ __forceinline__ int item_count(const ForwardParams& p) {
    return p.N * p.H * (p.pass == Pass::kWhole ? 1 : p.pass == Pass::kSegments ? p.segments : 2 * p.segments - 3);
}

// Item number `index` of a launch over segments. The sequences are batch rows, or there is one.
__device__ __forceinline__ Item find_segment(const ForwardParams& p, int index) {
    const int parts = item_count(p) / p.N, sequence = index / parts, part = index % parts / p.H;
    // Summaries: the first segment's state, then B and P of each further one.
    const bool summaries = p.pass == Pass::kSummaries;
    const int segment = summaries ? (part + 1) / 2 : part;
    const int2 bounds = p.cu_seqlens == nullptr ? int2{0, p.T} : sequence_bounds(p, sequence);
    // In 64 bits for T near 2^31.
    const int first = static_cast<int>(min(bounds.x + static_cast<long long>(segment) * p.segment_tokens, static_cast<long long>(bounds.y)));
    const int last = segment == p.segments - 1 ? bounds.y : min(bounds.y - first, p.segment_tokens) + first;
    return {sequence,
            index % p.H,
            p.cu_seqlens == nullptr ? sequence : 0,
            uniform(first),
            uniform(last - first),
            segment,
            summaries && segment > 0 && part % 2 == 0};
}

// Item number `index`, found by a whole warp. Up to 32 sequences are ordered by length, the longest first, so that what is left for the last
// blocks is short; more keep their order.
__device__ __forceinline__ Item find_item(const ForwardParams& p, int index, int lane) {
    if (p.pass != Pass::kWhole) return find_segment(p, index);
    const int place = index / p.H, head = index % p.H;
    if (p.cu_seqlens == nullptr) return {place, head, place, 0, p.T};
    if (p.N > 32) {
        const int2 bounds = sequence_bounds(p, place);
        return {place, head, 0, uniform(bounds.x), uniform(bounds.y - bounds.x)};
    }
    const int2 bounds = lane < p.N ? sequence_bounds(p, lane) : int2{0, 0};
    const int tokens = bounds.y - bounds.x;
    int rank = 0;
    for (int other = 0; other < p.N; ++other) {
        const int its = __shfl_sync(~0u, tokens, other);
        rank += its > tokens || (its == tokens && other < lane);
    }
    const int sequence = __ffs(__ballot_sync(~0u, lane < p.N && rank == place)) - 1;
    return {sequence, head, 0, __shfl_sync(~0u, bounds.x, sequence), __shfl_sync(~0u, tokens, sequence)};
}

// The numbers of a block's items: every grid-th, each round in the other direction than the one before, which evens out lengths that fall.
struct ItemNumbers {
    int round = 0;

    // The next one, or -1.
    __device__ __forceinline__ int next(const ForwardParams& p) {
        const int grid = gridDim.x, block = blockIdx.x, total = item_count(p);
        while (round * grid < total) {
            const int item = round * grid + (round % 2 == 0 ? block : grid - 1 - block);
            ++round;
            if (item < total) return item;
        }
        return -1;
    }
};

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
__device__ __forceinline__ void load_chunk(const Maps& maps, const Place<Config>& place, const Item& item, int chunk) {
    const uint32_t slot = place.slot();
    const int token = item.first + chunk * kChunkTokens;
    auto* full = reinterpret_cast<uint64_t*>(shared_pointer(place.full()));
    constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST);
    barrier_expect_bytes(place.full(), slot::kLoadBytes);
    using Load = cute::SM90_TMA_LOAD_5D;
    // Coordinates: channel in panel, token, panel, head, batch row.
    for (int panel = 0; panel < 2; ++panel) {
        const uint32_t at = slot + panel * slot::kKeyQueryPanelStride;
        Load::copy(&maps.k, full, kHint, shared_pointer(at + slot::kKey), 0, token, panel, item.head, item.batch);
        Load::copy(&maps.q, full, kHint, shared_pointer(at + slot::kQuery), 0, token, panel, item.head, item.batch);
    }
    Load::copy(&maps.g, full, kHint, shared_pointer(slot + slot::kGate), 0, token, 0, item.head, item.batch);
    Load::copy(&maps.v, full, kHint, shared_pointer(slot + slot::kValue), 0, token, 0, item.head, item.batch);
}

// Loads a block's chunks one after the other, through all its items.
template <class Config>
struct Loader {
    ItemNumbers numbers;
    Place<Config> place;
    Item item = {};
    int chunk = 0, count = 0;

    __device__ __forceinline__ Loader(const ForwardParams& p, uint32_t base, int lane) : place{base, 0, 0} { find(p, lane); }
    __device__ __forceinline__ bool finished() const { return chunk == count; }
    // By a whole warp, of which one lane is elected.
    __device__ __forceinline__ void load_next(const ForwardParams& p, const Maps& maps, bool elected, int lane) {
        if (elected) load_chunk(maps, place, item, chunk);
        place.advance();
        if (++chunk == count) find(p, lane);
    }

   private:
    // The next item that has a chunk.
    __device__ __forceinline__ void find(const ForwardParams& p, int lane) {
        chunk = count = 0;
        for (int number = numbers.next(p); count == 0 && number >= 0; number = count == 0 ? numbers.next(p) : -1) {
            item = find_item(p, number, lane);
            count = item.count();
        }
    }
};

// The last chunk of a sequence that is no multiple of 16: its missing rows belong to a neighbour.
__device__ __forceinline__ void store_tail(const ForwardParams& p, uint32_t out, const Item& item, int chunk, int lane) {
    const int part = lane & 15;  // 16 bytes of a 256-byte row
    char* row0 = static_cast<char*>(p.out) +
                 2 * (item.batch * p.out_strides.batch + (item.first + chunk * kChunkTokens) * p.out_strides.token + item.head * p.out_strides.head);
    for (int row = lane >> 4; row < item.valid(chunk); row += 2) {
        const float4 x = load_float4(out + (part >> 3) * slot::kPanelStride + row * 128 + (((part & 7) ^ (row & 7)) << 4));
        *reinterpret_cast<float4*>(row0 + 2 * row * p.out_strides.token + part * 16) = x;
    }
    cutlass::arch::fence_view_async_shared();  // these reads precede the copy engine's next writes
    __syncwarp();
}

template <class Config>
__device__ __forceinline__ void move(const ForwardParams& p, const Maps& maps, uint32_t base, int lane) {
    const bool elected = cute::elect_one_sync();
    Loader<Config> loader(p, base, lane);
    for (int stage = 0; stage < Config::kStages && !loader.finished(); ++stage) loader.load_next(p, maps, elected, lane);

    Place<Config> place{base, 0, 0};
    bool slot_before = false;
    ItemNumbers numbers;
    for (int number = numbers.next(p); number >= 0; number = numbers.next(p)) {
        const Item item = find_item(p, number, lane);
        const int count = item.count();
        for (int chunk = 0; chunk < count; ++chunk, place.advance()) {
            barrier_wait(place.done(), place.phase);
            const uint32_t out = place.slot() + slot::kOut;
            const bool whole = item.valid(chunk) == kChunkTokens;
            if (p.pass == Pass::kSummaries) {
                // no output
            } else if (!whole) {
                store_tail(p, out, item, chunk, lane);
            } else if (elected) {
                cute::SM90_TMA_STORE_5D::copy(&maps.o, shared_pointer(out), 0, item.first + chunk * kChunkTokens, 0, item.head, item.batch);
                cute::tma_store_arrive();
            }
            // The slot before this one can be loaded again once at most the store just issued still reads shared memory.
            if (slot_before && !loader.finished()) {
                if (elected) {
                    if (whole) {
                        cute::tma_store_wait<1>();
                    } else {
                        cute::tma_store_wait<0>();
                    }
                }
                loader.load_next(p, maps, elected, lane);
            }
            slot_before = true;
        }
    }
    if (elected) cute::tma_store_wait<0>();
}

// ---- prepare -------------------------------------------------------------------------------------------------------------------------

template <class Config>
__device__ __forceinline__ void prepare(const ForwardParams& p, uint32_t base, int warp, int lane) {
    const uint32_t scratch = base + Config::kScratchOffset + warp * kScratchBytes, bias = scratch + kBiasOffset;
    Place<Config> place{base, 0, 0};
    place.advance(warp);
    int mine = warp;  // this warp's next chunk, counted from the item's first
    ItemNumbers numbers;
    for (int number = numbers.next(p); number >= 0; number = numbers.next(p)) {
        const Item item = find_item(p, number, lane);
        const int count = item.count();
        if (mine < count) {
            const GateConstants gate = gate_constants(p, item.head);
            store_gate_bias(bias, gate, p.dt_bias + item.head * kHeadDim, lane);
            // Lane t's logit of a chunk, 0 past the end; fetched one round ahead, for it comes straight from memory.
            const auto load_logit = [&](int chunk) -> uint32_t {
                const int token = chunk * kChunkTokens + lane;
                if (lane >= kChunkTokens || token >= item.tokens) return 0;
                const long long at =
                    item.batch * p.beta_strides.batch + (item.first + token) * p.beta_strides.token + item.head * p.beta_strides.head;
                return static_cast<const unsigned short*>(p.beta)[at];
            };
            uint32_t next_logit = load_logit(mine);
            for (; mine < count; mine += Config::kPrepareWarps, place.advance(Config::kPrepareWarps)) {
                const int valid = item.valid(mine);
                const float logit = bf16_low(next_logit);
                next_logit = load_logit(mine + Config::kPrepareWarps);
                const float beta = lane < valid ? reciprocal_approx(1.f + exp2_approx(-kLog2E * logit)) : 0.f;
                barrier_wait(place.full(), place.phase);
                if (item.transition) clear_values(place.slot(), lane);
                const bool collinear = prepare_chunk(place.slot(), scratch, bias, gate, p.scale, beta, valid, lane);
                store_u32(place.collinear(), collinear);
                // These generic writes precede the copy engine's next writes to the slot, and wgmma's reads of it.
                cutlass::arch::fence_view_async_shared();
                __syncwarp();
                if (cute::elect_one_sync()) barrier_arrive(place.ready());
            }
        }
        mine -= count;
    }
}

// ---- states of items -----------------------------------------------------------------------------------------------------------------

// Where an item's state comes from or goes to.
struct StatePlace {
    const void* base = nullptr;  // null: nowhere
    int number = 0;              // of the state, from base
    bool fp32 = true;
};

__device__ __forceinline__ int boundary_number(const ForwardParams& p, const Item& item, int segment) {
    return (item.sequence * p.segments + segment) * p.H + item.head;
}

__device__ __forceinline__ StatePlace initial_place(const ForwardParams& p, const Item& item) {
    // Segments read the caller's initial state from where the summaries put it: another block may have stored the final one over it by now.
    if (p.pass == Pass::kSegments) return {p.boundary_states, boundary_number(p, item, item.segment), true};
    if (item.segment > 0) return {};
    return {p.initial_state, item.sequence * p.H + item.head, p.initial_is_fp32 != 0};
}

// Where to put the state before the first token.
__device__ __forceinline__ StatePlace copy_place(const ForwardParams& p, const Item& item) {
    if (p.pass != Pass::kSummaries || item.segment > 0) return {};
    return {p.boundary_states, boundary_number(p, item, 0), true};
}

__device__ __forceinline__ StatePlace final_place(const ForwardParams& p, const Item& item) {
    if (p.pass == Pass::kSummaries) {
        if (item.transition) return {p.transitions, boundary_number(p, item, item.segment), true};
        return {p.boundary_states, boundary_number(p, item, item.segment + 1), true};
    }
    if (p.pass == Pass::kSegments && item.segment != p.segments - 1) return {};
    return {p.final_state, item.sequence * p.H + item.head, p.final_is_fp32 != 0};
}

// A scan warp's place for the final state, kept in shared memory meanwhile: its loop has no register to spare.
template <class Config>
__device__ __forceinline__ uint32_t keep_place(uint32_t base, int warp, const StatePlace& place) {
    const uint32_t at = base + Config::kStateOffset + warp * 16;
    const auto bits = reinterpret_cast<uint64_t>(place.base);
    const uint32_t words[4] = {static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32), static_cast<uint32_t>(place.number), place.fp32};
    store_u32x4(at, words);
    __syncwarp();
    return at;
}

__device__ __forceinline__ StatePlace kept_place(uint32_t at) {
    const uint64_t bits = load_u32(at) | static_cast<uint64_t>(load_u32(at + 4)) << 32;
    return {reinterpret_cast<const void*>(bits), static_cast<int>(load_u32(at + 8)), load_u32(at + 12) != 0};
}

// ---- block ---------------------------------------------------------------------------------------------------------------------------

// What comes before the roles part: addresses and barriers. Ends with a block-wide barrier.
template <class Config>
struct Block {
    uint32_t base;  // shared memory, 1024-byte aligned
    int warp, lane;

    __device__ __forceinline__ Block() {
        extern __shared__ char dynamic_shared[];
        const uint32_t unaligned = cute::cast_smem_ptr_to_uint(dynamic_shared);
        base = (unaligned + slot::kAlignment - 1) & ~(slot::kAlignment - 1);
        warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
        if (threadIdx.x == 0) {
            for (Place<Config> place{base, 0, 0}; place.phase == 0; place.advance()) {
                barrier_init(place.full(), 1);
                barrier_init(place.ready(), 1);
                barrier_init(place.done(), kScanWarps);
            }
            cutlass::arch::fence_barrier_init();
        }
        __syncthreads();
    }

    // The roles of the warps after the scan warps.
    __device__ __forceinline__ void feed(const ForwardParams& p, const Maps& maps) const {
        const int helper = warp - kScanWarps;
        if (helper < Config::kPrepareWarps) {
            prepare<Config>(p, base, helper, lane);
        } else if (helper == Config::kPrepareWarps) {
            move<Config>(p, maps, base, lane);
        }
    }
};

}  // namespace flash_kda
