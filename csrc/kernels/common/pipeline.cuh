// What every forward kernel shares: the ring of slots, and the roles that feed and drain it. The roles run ahead of one another as far as the ring
// lets them, also from one item into the next.
//
// A slot goes: full (tiles have landed) -> ready (prepared) -> done (consumed, O written over V) -> stored, loaded again.
// Prepare warps take chunks round robin; one warp moves data; what scans the state is each kernel's own.
#pragma once

#include "kernels/common/forget.cuh"
#include "kernels/common/prepare.cuh"
#include "kernels/common/schedule.cuh"
#include "kernels/common/segments.cuh"

namespace flash_kda {

struct Maps {
    TensorMap q, k;     // box: one 64-channel panel x 16 tokens
    TensorMap v, g, o;  // box: two panels x 16 tokens
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

template <class Config>
using WalkOf = cute::conditional_t<Config::kSegments, SegmentWalk, Walk>;

// What a block knows of itself.
template <class Config>
struct Block {
    uint32_t base;  // shared memory, 1024-byte aligned
    int warp, lane;

    // Ends with a block-wide barrier.
    __device__ __forceinline__ explicit Block(const ForwardParams& p);
    __device__ __forceinline__ int share(int word) const { return share::word(base + Config::kScheduleOffset, word); }
    __device__ __forceinline__ WalkOf<Config> items() const {
        if constexpr (Config::kSegments) {
            return WalkOf<Config>(SegmentWalk::kBegin);
        } else {
            return WalkOf<Config>(share(share::kFirst));
        }
    }
    __device__ __forceinline__ bool next_item(const ForwardParams& p, WalkOf<Config>& walk, Item& item) const {
        return walk.next(p, base + Config::kScheduleOffset, item);
    }
    __device__ __forceinline__ Place<Config> first_place() const { return {base, 0, 0}; }
};

// ---- states of items -----------------------------------------------------------------------------------------------------------------

// Where an item's state comes from or goes to.
struct StatePlace {
    const void* base = nullptr;  // null: nowhere
    int number = 0;              // of the state, from base
    bool fp32 = true;
    bool handoff = false;    // to another block, which waits for it
    bool key_first = false;  // [K, V]
};

__device__ __forceinline__ long long load_index(const IndexTensor& tensor, long long at) {
    return tensor.is_int64 ? static_cast<const long long*>(tensor.data)[at] : static_cast<const int*>(tensor.data)[at];
}

// The state of a head in one row of a tensor.
__device__ __forceinline__ StatePlace place_in(const ForwardParams& p, const StateTensor& tensor, long long row, int head) {
    return {static_cast<const char*>(tensor.data) + row * tensor.row * (tensor.is_fp32 ? 4 : 2), head, tensor.is_fp32 != 0, false, p.key_first != 0};
}

// An item's state among the caller's initial or final ones.
__device__ __forceinline__ StatePlace place_of(const ForwardParams& p, const StateTensor& tensor, const Item& item) {
    if (tensor.data == nullptr) return {};
    long long row = item.sequence;
    if (p.slots.data != nullptr) {
        row = load_index(p.slots, row);
        if (row < 0 || row >= p.pool_rows) return {};
    }
    return place_in(p, tensor, row, item.head);
}

__device__ __forceinline__ StatePlace initial_place(const ForwardParams& p, const Item& item) {
    if (item.taken_over >= 0) return {p.handoff_states, item.taken_over, true};
    return item.window ? StatePlace{} : place_of(p, p.initial, item);
}

__device__ __forceinline__ StatePlace final_place(const ForwardParams& p, const Item& item) {
    if (item.window) return {};
    if (item.handed_on >= 0) return {p.handoff_states, item.handed_on, true, true};
    return place_of(p, p.final, item);
}

// ---- move ----------------------------------------------------------------------------------------------------------------------------

// Tiles that an item has no use for: for states alone there are no queries, and for P no values.
template <class Config>
__device__ __forceinline__ int unwanted(const Item& item) {
    if (!Config::kSegments || item.stretch < 0) return 0;
    return by_hand::kQuery | (item.transition ? by_hand::kValue : 0);
}

// What the copy engine cannot take is left to the warp that prepares the chunk.
template <class Config>
__device__ __forceinline__ void load_chunk(const ForwardParams& p, const Maps& maps, const Place<Config>& place, const Item& item, int chunk) {
    const uint32_t slot = place.slot();
    const int token = item.first + chunk * kChunkTokens;
    auto* full = reinterpret_cast<uint64_t*>(shared_pointer(place.full()));
    constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST);
    // By hand, or not at all: states alone want no queries, and P no values.
    const int others = (Config::kGeneral ? p.by_hand : 0) | unwanted<Config>(item);
    barrier_expect_bytes(place.full(),
                         Config::kGeneral || Config::kSegments ? 2 * slot::kPanelBytes * (4 - __popc(others & ~by_hand::kOut)) : slot::kLoadBytes);
    using Load = cute::SM90_TMA_LOAD_5D;
    const int key_head = p.group == 1 ? item.head : item.head / p.group;
    // Coordinates: channel in panel, token, panel, head, batch row.
    for (int panel = 0; panel < 2; ++panel) {
        const uint32_t at = slot + panel * slot::kKeyQueryPanelStride;
        if ((others & by_hand::kKey) == 0) {
            Load::copy(&maps.k, full, kHint, shared_pointer(at + slot::kKey), 0, token, panel, key_head, item.batch);
        }
        if ((others & by_hand::kQuery) == 0) {
            Load::copy(&maps.q, full, kHint, shared_pointer(at + slot::kQuery), 0, token, panel, key_head, item.batch);
        }
    }
    if ((others & by_hand::kGate) == 0) Load::copy(&maps.g, full, kHint, shared_pointer(slot + slot::kGate), 0, token, 0, item.head, item.batch);
    if ((others & by_hand::kValue) == 0) Load::copy(&maps.v, full, kHint, shared_pointer(slot + slot::kValue), 0, token, 0, item.head, item.batch);
}

// An fp32 g is read by the warp that prepares the chunk: brought near ahead of time. A row is 512 bytes, seen as four lines.
__device__ __forceinline__ void prefetch_gate(const ForwardParams& p, const Item& item, int chunk, int lane) {
    const int valid = item.valid(chunk);
    for (int row = lane >> 2; row < valid; row += 8) {
        const float* line = token_row<float>(p.g, item.batch, item.first + chunk * kChunkTokens + row, item.head) + (lane & 3) * 32;
        asm volatile("prefetch.global.L2 [%0];" : : "l"(line));
    }
}

// Loads a block's chunks one after the other, through all its items.
template <class Config>
struct Loader {
    WalkOf<Config> walk;
    Place<Config> place;
    Item item = {};
    int chunk = 0, count = 0;

    __device__ __forceinline__ Loader(const ForwardParams& p, const Block<Config>& block) : walk(block.items()), place(block.first_place()) {
        find(p, block);
    }
    __device__ __forceinline__ bool finished() const { return chunk == count; }
    // By a whole warp, of which one lane is elected.
    __device__ __forceinline__ void load_next(const ForwardParams& p, const Maps& maps, bool elected, const Block<Config>& block) {
        if (elected) load_chunk(p, maps, place, item, chunk);
        if (Config::kGeneral && p.g_is_fp32) prefetch_gate(p, item, chunk, block.lane);
        place.advance();
        if (++chunk == count) find(p, block);
    }

   private:
    // The next item that has a chunk.
    __device__ __forceinline__ void find(const ForwardParams& p, const Block<Config>& block) {
        chunk = count = 0;
        while (count == 0 && block.next_item(p, walk, item)) count = item.count();
    }
};

// Rows of O that the copy engine cannot take: the last chunk of a sequence that is no multiple of 16, whose missing rows belong to a neighbour, or all of
// an `out` of odd strides.
template <class Config>
__device__ __forceinline__ void store_rows(const ForwardParams& p, uint32_t out, const Item& item, int chunk, int lane) {
    const int part = lane & 15;  // 16 bytes of a 256-byte row
    const bool by_16_bytes = !Config::kGeneral || (p.by_hand & by_hand::kOut) == 0;
    auto* row0 = const_cast<unsigned short*>(token_row<unsigned short>(p.out, item.batch, item.first + chunk * kChunkTokens, item.head)) + part * 8;
#pragma unroll 1
    for (int row = lane >> 4; row < item.valid(chunk); row += 2) {
        const float4 x = load_float4(out + (part >> 3) * slot::kPanelStride + row * 128 + (((part & 7) ^ (row & 7)) << 4));
        unsigned short* to = row0 + row * p.out.strides.token;
        if (by_16_bytes) {
            *reinterpret_cast<float4*>(to) = x;
            continue;
        }
        const uint32_t pairs[4] = {__float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z), __float_as_uint(x.w)};
#pragma unroll
        for (int i = 0; i < 8; ++i) to[i] = static_cast<unsigned short>(pairs[i / 2] >> 16 * (i % 2));
    }
    cutlass::arch::fence_view_async_shared();  // these reads precede the copy engine's next writes
    __syncwarp();
}

// How many chunks before an item's end the state that the next one starts from is asked for.
inline constexpr int kPrefetchChunks = 4;

// Brings it into L2.
__device__ __forceinline__ void prefetch_state(const ForwardParams& p, const Item& item) {
    if (item.taken_over >= 0) return;  // not there yet
    const StatePlace place = initial_place(p, item);
    if (place.base == nullptr) return;
    const uint32_t bytes = kHeadDim * kHeadDim * (place.fp32 ? 4 : 2);
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;"
                 :
                 : "l"(static_cast<const char*>(place.base) + static_cast<long long>(place.number) * bytes), "r"(bytes)
                 : "memory");
}

template <class Config>
__device__ __forceinline__ void move(const ForwardParams& p, const Maps& maps, const Block<Config>& block) {
    const bool elected = cute::elect_one_sync();
    Loader<Config> loader(p, block);
    for (int stage = 0; stage < Config::kStages && !loader.finished(); ++stage) loader.load_next(p, maps, elected, block);

    Place<Config> place = block.first_place();
    bool slot_before = false;
    const auto drain = [&](const Item& item, bool more, const Item& coming) {
        const int count = item.count();
        for (int chunk = 0; chunk < count; ++chunk, place.advance()) {
            if (more && elected && chunk == max(count - kPrefetchChunks, 0)) prefetch_state(p, coming);
            barrier_wait(place.done(), place.phase);
            const uint32_t out = place.slot() + slot::kOut;
            const bool whole = item.valid(chunk) == kChunkTokens && (!Config::kGeneral || (p.by_hand & by_hand::kOut) == 0);
            if (item.window || (Config::kSegments && item.stretch >= 0)) {
                // no output
            } else if (!whole) {
                store_rows<Config>(p, out, item, chunk, block.lane);
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
                loader.load_next(p, maps, elected, block);
            }
            slot_before = true;
        }
    };
    auto walk = block.items();
    Item item;
    if constexpr (Config::kSegments) {  // which item comes next may not be known yet
        while (block.next_item(p, walk, item)) drain(item, false, item);
    } else {
        for (bool more = block.next_item(p, walk, item); more;) {
            Item coming;
            more = block.next_item(p, walk, coming);
            drain(item, more, coming);
            item = coming;
        }
    }
    if (elected) cute::tma_store_wait<0>();
}

// ---- prepare -------------------------------------------------------------------------------------------------------------------------

// The tiles of a chunk that the copy engine could not bring, by the warp that prepares it. Rolled: seldom done, and long.
__device__ __forceinline__ void load_by_hand(const ForwardParams& p, int tiles, uint32_t slot, const Origin& origin, int valid, int lane) {
#pragma unroll 1
    for (int which = by_hand::kQuery; which <= by_hand::kGate; which *= 2) {
        if ((tiles & which) == 0 || (which == by_hand::kGate && p.g_is_fp32)) continue;
        const bool key_query = which <= by_hand::kKey;
        const TokenTensor& tensor = which == by_hand::kQuery ? p.q : which == by_hand::kKey ? p.k : which == by_hand::kValue ? p.v : p.g;
        const int tile = which == by_hand::kQuery  ? slot::kQuery
                         : which == by_hand::kKey  ? slot::kKey
                         : which == by_hand::kGate ? slot::kGate
                                                   : slot::kValue;
        load_rows(slot + tile, key_query ? slot::kKeyQueryPanelStride : slot::kPanelStride,
                  token_row<unsigned short>(tensor, origin.batch, origin.token, key_query ? origin.head / p.group : origin.head),
                  tensor.strides.token, valid, lane);
    }
    __syncwarp();
}

// A warp's chunks of an item: `mine`, counted from the item's first, and every kPrepareWarps-th after it.
template <bool kQueries, class Config>
__device__ __forceinline__ void prepare_item(const ForwardParams& p, uint32_t scratch, Place<Config>& place, const Item& item, int& mine, int lane) {
    const uint32_t bias = scratch + kBiasOffset;
    const GateConstants gate = gate_constants(p, item.head);
    store_gate_bias(bias, p, gate, item.head, lane);
    // Lane t's beta of a chunk, as it lies in memory; 0 past the end. Fetched one round ahead, for it comes straight from there.
    const auto load_beta = [&](int chunk) -> uint32_t {
        const int token = chunk * kChunkTokens + lane;
        if (lane >= kChunkTokens || token >= item.tokens) return 0;
        const TokenStrides& strides = p.beta.strides;
        const long long at = item.batch * strides.batch + (item.first + token) * strides.token + item.head * strides.head;
        return p.beta_is_fp32 ? static_cast<const uint32_t*>(p.beta.data)[at] : static_cast<const unsigned short*>(p.beta.data)[at];
    };
    uint32_t next_beta = load_beta(mine);
    for (const int count = item.count(); mine < count; mine += Config::kPrepareWarps, place.advance(Config::kPrepareWarps)) {
        const int valid = item.valid(mine);
        float beta = p.beta_is_fp32 ? __uint_as_float(next_beta) : bf16_low(next_beta);
        next_beta = load_beta(mine + Config::kPrepareWarps);
        if (p.beta_is_logit) beta = reciprocal_approx(1.f + exp2_approx(-kLog2E * beta));
        beta = lane < valid ? p.beta_factor * beta : 0.f;
        const Origin origin = {item.batch, item.first + mine * kChunkTokens, item.head};
        // A barrier tells a turn of the ring only from the one before it: see first that the slot's turn before this one is over.
        barrier_wait(place.done(), place.phase ^ 1);
        barrier_wait(place.full(), place.phase);
        if (Config::kGeneral) {
            const int tiles = p.by_hand & ~(by_hand::kOut | unwanted<Config>(item));
            if (tiles != 0) load_by_hand(p, tiles, place.slot(), origin.hidden(), valid, fresh_lane());
        }
        if (item.transition) clear_values(place.slot(), lane);
        const bool collinear = prepare_chunk<Config::kGeneral, kQueries>(p, place.slot(), scratch, bias, gate, origin, beta, valid, lane);
        store_u32(place.collinear(), collinear);
        // These generic writes precede the copy engine's next writes to the slot, and wgmma's reads of it.
        cutlass::arch::fence_view_async_shared();
        __syncwarp();
        if (cute::elect_one_sync()) barrier_arrive(place.ready());
    }
}

template <class Config>
__device__ __forceinline__ void prepare(const ForwardParams& p, const Block<Config>& block, int warp) {
    const uint32_t scratch = block.base + Config::kScratchOffset + warp * kScratchBytes;
    Place<Config> place = block.first_place();
    place.advance(warp);
    int mine = warp;  // this warp's next chunk, counted from the item's first
    auto walk = block.items();
    for (Item item; block.next_item(p, walk, item);) {
        const int count = item.count();
        if (mine < count) {
            if (Config::kSegments && item.stretch >= 0) {
                prepare_item<false>(p, scratch, place, item, mine, block.lane);
            } else {
                prepare_item<true>(p, scratch, place, item, mine, block.lane);
            }
        }
        mine -= count;
    }
}

// ---- what a scan warp keeps----------------------------------------------------------------------------------------------------------

// Chunks of the item that are still to come.
template <class Config>
__device__ __forceinline__ uint32_t left_at(const Block<Config>& block) {
    return block.base + Config::kKeptOffset + threadIdx.x / 32 * kKeptBytes + kKeptLeft;
}

// Whether the state before a window proved to be forgotten after it.
template <class Config>
__device__ __forceinline__ uint32_t forgotten_at(const Block<Config>& block) {
    return block.base + Config::kKeptOffset + threadIdx.x / 32 * kKeptBytes + kKeptForgotten;
}

// What a scan warp needs again after an item's last chunk, kept in shared memory meanwhile: its loop has no register to spare.
struct Kept {
    StatePlace final;
    Walk walk;
    bool judge;  // the state is P of a window
};

template <class Config>
__device__ __forceinline__ void keep(const Block<Config>& block, const StatePlace& final, const Walk& walk, bool judge, int chunks) {
    const uint32_t at = block.base + Config::kKeptOffset + threadIdx.x / 32 * kKeptBytes;
    const auto bits = reinterpret_cast<uint64_t>(final.base);
    const uint32_t words[4] = {static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32), static_cast<uint32_t>(final.number),
                               static_cast<uint32_t>(final.fp32) | static_cast<uint32_t>(final.handoff) << 1 |
                                   static_cast<uint32_t>(final.key_first) << 2 | static_cast<uint32_t>(judge) << 3 |
                                   static_cast<uint32_t>(walk.windows) << 4};
    store_u32x4(at, words);
    store_u32(at + 16, walk.number);
    store_u32(left_at(block), chunks);
    __syncwarp();
}

template <class Config>
__device__ __forceinline__ Kept kept(const Block<Config>& block) {
    const uint32_t at = block.base + Config::kKeptOffset + threadIdx.x / 32 * kKeptBytes;
    const uint64_t bits = load_u32(at) | static_cast<uint64_t>(load_u32(at + 4)) << 32;
    const uint32_t flags = uniform(load_u32(at + 12));
    Kept kept = {{reinterpret_cast<const void*>(bits), static_cast<int>(load_u32(at + 8)), (flags & 1) != 0, (flags & 2) != 0, (flags & 4) != 0},
                 Walk(uniform(load_u32(at + 16)), static_cast<int>(flags >> 4)),
                 (flags & 8) != 0};
    __syncwarp();
    return kept;
}

// Where states are saved on the way, kept likewise. Positions are in chunks from the sequence's start.
struct KeptSaves {
    int at;          // the next chunk
    int begin, end;  // the item's first chunk, and the one after its last
    int sequence, head;
    int first_row;  // of the sequence's snapshots
    int marks_at;   // address of the chunks before each checkpoint, -1 where there is none
};

inline constexpr int kMostMarks = 2;

// A sequence's first row of snapshots, by a whole warp.
__device__ __forceinline__ int first_snapshot(const ForwardParams& p, int sequence, int lane) {
    constexpr int kTokens = kSnapshotChunks * kChunkTokens;
    if (p.cu_seqlens == nullptr) return sequence * ((p.T + kTokens - 1) / kTokens);
    int sum = 0;
    for (int n = lane; n < sequence; n += 32) {
        const int2 bounds = sequence_bounds(p, n);
        sum += (bounds.y - bounds.x + kTokens - 1) / kTokens;
    }
    return __reduce_add_sync(~0u, sum);
}

template <class Config>
__device__ __forceinline__ void keep_saves(const Block<Config>& block, const ForwardParams& p, const Item& item) {
    const uint32_t at = block.base + Config::kKeptOffset + threadIdx.x / 32 * kKeptBytes + kKeptSaves;
    const int2 bounds = sequence_bounds(p, item.sequence);
    const int begin = (item.first - bounds.x) / kChunkTokens;
    store_u32(at, begin), store_u32(at + 4, begin + item.count());
    store_u32(at + 8, item.sequence), store_u32(at + 12, item.head);
    store_u32(at + 16, p.snapshots.data == nullptr ? 0 : first_snapshot(p, item.sequence, fresh_lane()));
#pragma unroll 1
    for (int i = 0; i < kMostMarks; ++i) {
        const long long tokens = i < p.marks_each ? load_index(p.marks, static_cast<long long>(item.sequence) * p.marks_each + i) : 0;
        const bool there = tokens > 0 && tokens <= bounds.y - bounds.x && tokens % kChunkTokens == 0;
        store_u32(at + 20 + 4 * i, there ? static_cast<int>(tokens / kChunkTokens) : -1);
    }
    __syncwarp();
}

template <class Config>
__device__ __forceinline__ KeptSaves kept_saves(const Block<Config>& block) {
    const uint32_t at = block.base + Config::kKeptOffset + threadIdx.x / 32 * kKeptBytes + kKeptSaves;
    const auto word = [&](int i) { return uniform(load_u32(at + 4 * i)); };
    const int end = word(1);
    return {end - uniform(load_u32(left_at(block))), word(0), end, word(2), word(3), word(4), static_cast<int>(at + 20)};
}

// Where to save the state: before chunk `at` in snapshot 0, after the ones before it in checkpoints 1, 2.
__device__ __forceinline__ StatePlace save_place(const ForwardParams& p, const KeptSaves& saves, int which) {
    if (which == 0) {
        const int row = saves.first_row + saves.at / kSnapshotChunks;
        if (p.snapshots.data == nullptr || saves.at % kSnapshotChunks != 0 || saves.at == saves.end || row >= p.snapshot_rows) return {};
        return place_in(p, p.snapshots, row, saves.head);
    }
    // At an item's first chunk the checkpoint is the business of whoever came before.
    if (saves.at == saves.begin || static_cast<int>(load_u32(saves.marks_at + 4 * (which - 1))) != saves.at) return {};
    return place_in(p, p.checkpoints, static_cast<long long>(saves.sequence) * p.marks_each + which - 1, saves.head);
}

// How many chunks on there may be something to save next, or the item ends.
__device__ __forceinline__ int next_save(const ForwardParams& p, const KeptSaves& saves) {
    int next = saves.end;
    if (p.snapshots.data != nullptr) next = min(next, (saves.at / kSnapshotChunks + 1) * kSnapshotChunks);
#pragma unroll
    for (int i = 0; i < kMostMarks; ++i) {
        const int mark = load_u32(saves.marks_at + 4 * i);
        if (mark > saves.at) next = min(next, mark);
    }
    return uniform(next) - saves.at;
}

// By a whole warp: for the state at a boundary, and that it is there. The flag is cleared once seen: a replayed graph comes with the same ticket.
__device__ __forceinline__ void wait_for_handoff(const ForwardParams& p, int boundary, int rows, int lane) {
    unsigned long long* flag = p.handoff_flags + boundary * kScanWarps + rows;
    while (!__all_sync(~0u, observe(flag) == p.ticket)) __nanosleep(64);
    store_elected(flag, 0, lane == 0);
}

__device__ __forceinline__ void announce_handoff(const ForwardParams& p, int boundary, int rows, int lane) {
    publish(p.handoff_flags + boundary * kScanWarps + rows, p.ticket, lane == 0);
}

// ---- block ---------------------------------------------------------------------------------------------------------------------------

template <class Config>
__device__ __forceinline__ Block<Config>::Block(const ForwardParams& p) {
    extern __shared__ char dynamic_shared[];
    const uint32_t unaligned = cute::cast_smem_ptr_to_uint(dynamic_shared);
    base = (unaligned + slot::kAlignment - 1) & ~(slot::kAlignment - 1);
    if constexpr (!Config::kSegments) find_share<Config>(p, base + Config::kScheduleOffset);
    if (threadIdx.x == 0) {
        for (Place<Config> place = first_place(); place.phase == 0; place.advance()) {
            barrier_init(place.full(), 1);
            barrier_init(place.ready(), 1);
            barrier_init(place.done(), kScanWarps);
        }
        if (Config::kSegments) barrier_init(base + Config::kScheduleOffset + share::kDecided, 1);
        cutlass::arch::fence_barrier_init();
    }
    __syncthreads();
    if (Config::kSegments || p.may_forget) {
        const uint32_t at = base + Config::kScheduleOffset, scratch = base + Config::kScratchOffset;
        if constexpr (Config::kSegments) {
            survey_segment<Config>(p, at, scratch);
        } else {
            survey_share<Config>(p, at, scratch);
        }
        __syncthreads();
    }
    warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
}

// The roles of the warps after the scan warps.
template <class Config>
__device__ __forceinline__ void feed(const ForwardParams& p, const Maps& maps, const Block<Config>& block) {
    const int helper = block.warp - kScanWarps;
    if (helper < Config::kPrepareWarps) {
        prepare(p, block, helper);
    } else if (helper == Config::kPrepareWarps) {
        move(p, maps, block);
    }
}

}  // namespace flash_kda
