// Which items a block works through, and in which order. A worker is a block; they are numbered against the order of blocks.
//
// Whole sequences (Pass::kWhole). Items that cannot be cut, for they or the shares are short, are dealt out in turn. Else items are shared out evenly,
// whatever their lengths. A sequence longer than an even share gets a worker to itself for each head. The others' items (a sequence's heads, then the
// next sequence's) lie one after the other on an axis, each as long as its chunks plus what an item costs besides, and worker i of the rest takes
// [iQ, (i+1)Q), with Q the larger of an even share and the longest item (McNaughton's wrap-around rule): an item that crosses a boundary is cut there, its
// earlier tokens are the first thing that the worker after the boundary does, its later tokens the last thing of the worker before, which gets the
// state through global memory. They cannot overlap, for no item is longer than Q. The state is handed over in fp32: cutting changes no bit.
//
// A worker waits only for the one after it, whose block has been started before its own.
#pragma once

#include "kernels/common/ptx.cuh"
#include "kernels/common/ring.h"
#include "kernels/common/schedule.h"

namespace flash_kda {

// One sequence of one head, or a part of one: what a block works through from an initial to a final state.
struct Item {
    int sequence, head;
    int batch;  // row of [B, T]
    int first;  // first token in that row
    int tokens;
    int segment = 0;
    bool transition = false;              // find P: start from the identity, v = 0
    int taken_over = -1, handed_on = -1;  // boundary at which the state before, or after it, changes hands
    __device__ __forceinline__ int count() const { return (tokens + kChunkTokens - 1) / kChunkTokens; }
    __device__ __forceinline__ int valid(int chunk) const { return min(kChunkTokens, tokens - chunk * kChunkTokens); }
};

// The host cannot look at the offsets without waiting for the device: bad ones are kept inside the tensors here.
__device__ __forceinline__ int2 sequence_bounds(const ForwardParams& p, int sequence) {
    if (p.cu_seqlens == nullptr) return {0, p.T};
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

__device__ __forceinline__ int chunks_of(int2 bounds) {
    return (bounds.y - bounds.x + kChunkTokens - 1) / kChunkTokens;
}

// A block's share, in shared memory, words: items first, first + step, ... before last; how many chunks at the end of the first item are not this
// block's; how many at the end of item `last` are; the worker's number; from how many chunks on sequences are not this worker's.
namespace share {
inline constexpr int kFirst = 0, kLast = 4, kStep = 8, kFirstCut = 12, kLastCut = 16, kWorker = 20, kTooLong = 24;
// Room to find it, for each warp.
inline constexpr int kSums = 64, kMaxima = kSums + 16 * 8, kCounts = kMaxima + 16 * 4;
static_assert(kCounts + 16 * 4 <= kScheduleBytes);

// One word of it, which the compiler then knows to be the same in the whole warp.
__device__ __forceinline__ int word(uint32_t at, int which) {
    return uniform(load_u32(at + which));
}
}  // namespace share

// Item number `index` of a launch over segments. The sequences are batch rows, or there is one.
__device__ __forceinline__ Item find_segment(const ForwardParams& p, int index) {
    // Summaries: the first segment's state, then B and P of each further one.
    const bool summaries = p.pass == Pass::kSummaries;
    const int parts = p.H * (summaries ? 2 * p.segments - 3 : p.segments), sequence = index / parts, part = index % parts / p.H;
    const int segment = summaries ? (part + 1) / 2 : part;
    const int2 bounds = sequence_bounds(p, sequence);
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

// The items of a block, one after the other. `at`: address of its share. Everything is the same in the whole warp, and known to be: what depends on an item
// stays in uniform registers.
struct Walk {
    int number;

    __device__ __forceinline__ explicit Walk(int number_) : number(number_) {}

    __device__ __forceinline__ bool next(const ForwardParams& p, uint32_t at, Item& item) {
        const int last = share::word(at, share::kLast), last_cut = share::word(at, share::kLastCut);
        for (;;) {
            if (number > last || (number == last && last_cut == 0)) return false;
            if (p.pass != Pass::kWhole) {
                item = find_segment(p, number);
                break;
            }
            const int sequence = number / p.H;
            const int2 bounds = sequence_bounds(p, sequence);
            item = {sequence, number - sequence * p.H, p.cu_seqlens == nullptr ? sequence : 0, uniform(bounds.x), uniform(bounds.y - bounds.x)};
            if (item.count() < share::word(at, share::kTooLong)) break;
            number = (sequence + 1) * p.H;
        }
        if (number == last) {
            const int before = (item.count() - last_cut) * kChunkTokens;
            item.first += before, item.tokens -= before, item.taken_over = share::word(at, share::kWorker) + 1;
        } else if (number == share::word(at, share::kFirst)) {
            const int cut = share::word(at, share::kFirstCut);
            if (cut > 0) item.tokens = (item.count() - cut) * kChunkTokens, item.handed_on = share::word(at, share::kWorker);
        }
        number += share::word(at, share::kStep);
        return true;
    }
};

namespace schedule {

// Where a boundary lies: `cut` chunks of item `item` are left of it, or none.
struct Boundary {
    int item, cut;
};

// The one at `at` chunks into the items of a sequence; at the nearer end of an item where a part would be too short.
__device__ __forceinline__ Boundary boundary_in(const ForwardParams& p, int sequence, int chunks, long long at) {
    const int head = static_cast<int>(at / (chunks + kItemCost)), item = sequence * p.H + head;
    const int left = static_cast<int>(at - static_cast<long long>(head) * (chunks + kItemCost)) - kItemCost;
    if (left >= kLeastPart && chunks - left >= kLeastPart) return {item, left};
    return {2 * left < chunks ? item : item + 1, 0};
}

__device__ __forceinline__ void store_first(uint32_t at, const Boundary& boundary) {
    store_u32(at + share::kFirst, boundary.item), store_u32(at + share::kFirstCut, boundary.cut);
}

__device__ __forceinline__ void store_last(uint32_t at, const Boundary& boundary) {
    store_u32(at + share::kLast, boundary.item), store_u32(at + share::kLastCut, boundary.cut);
}

}  // namespace schedule

// Sums over all sequences, and over those before this thread's.
struct Census {
    long long before, total;    // of chunks and items' costs, of one head
    int longest;                // in chunks, of those counted
    int others_before, others;  // sequences not counted
};

// Counts the sequences of fewer than `limit` chunks, by all threads of the block, each of which looks at a run of them.
template <class Config>
__device__ __forceinline__ Census count_sequences(const ForwardParams& p, uint32_t at, int begin, int end, int limit) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    long long mine = 0;
    int longest = 0, others = 0;
    for (int n = begin; n < end; ++n) {
        const int chunks = chunks_of(sequence_bounds(p, n));
        if (chunks < limit) {
            mine += chunks + kItemCost, longest = max(longest, chunks);
        } else {
            ++others;
        }
    }
    long long sum = mine;
    int count = others;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const long long other_sum = __shfl_up_sync(~0u, sum, step);
        const int other_count = __shfl_up_sync(~0u, count, step);
        if (lane >= step) sum += other_sum, count += other_count;
    }
    longest = __reduce_max_sync(~0u, longest);
    __syncthreads();  // the room may still be in use
    if (lane == 31) {
        const uint32_t sums = at + share::kSums + warp * 8;
        store_u32(sums, static_cast<uint32_t>(sum)), store_u32(sums + 4, static_cast<uint32_t>(sum >> 32));
        store_u32(at + share::kMaxima + warp * 4, longest);
        store_u32(at + share::kCounts + warp * 4, count);
    }
    __syncthreads();
    Census census = {sum - mine, 0, 0, count - others, 0};
    for (int w = 0; w < Config::kWarps; ++w) {
        const uint32_t sums = at + share::kSums + w * 8;
        const long long its_sum = load_u32(sums) | static_cast<long long>(load_u32(sums + 4)) << 32;
        const int its_count = load_u32(at + share::kCounts + w * 4);
        if (w < warp) census.before += its_sum, census.others_before += its_count;
        census.total += its_sum, census.others += its_count;
        census.longest = max(census.longest, static_cast<int>(load_u32(at + share::kMaxima + w * 4)));
    }
    return census;
}

// Finds this block's share, by all threads of the block; `at`: kScheduleBytes of shared memory, the share in front. A block-wide barrier must follow before
// the share is read.
template <class Config>
__device__ __forceinline__ void find_share(const ForwardParams& p, uint32_t at) {
    using namespace schedule;
    constexpr int kNoLimit = 1 << 30;
    const int thread = threadIdx.x, workers = gridDim.x, worker = workers - 1 - blockIdx.x;
    const int items = p.N * p.H * (p.pass == Pass::kWhole ? 1 : p.pass == Pass::kSegments ? p.segments : 2 * p.segments - 3);
    if (thread == 0) {
        store_first(at, {worker, 0}), store_last(at, {items, 0});
        store_u32(at + share::kStep, workers), store_u32(at + share::kWorker, worker), store_u32(at + share::kTooLong, kNoLimit);
    }
    if (items <= workers || p.handoff_states == nullptr) return;

    const int run = (p.N + Config::kThreads - 1) / Config::kThreads, begin = min(thread * run, p.N), end = min(begin + run, p.N);
    Census census = count_sequences<Config>(p, at, begin, end, kNoLimit);
    const auto even_share = [&](int among) { return (census.total * p.H + among - 1) / among; };
    if (census.longest < 2 * kLeastPart || even_share(workers) < kLeastShare) return;
    const int limit = static_cast<int>(even_share(workers)) - kItemCost + 1;
    int alone = 0;  // workers with one item each
    if (census.longest >= limit) {
        census = count_sequences<Config>(p, at, begin, end, limit);
        alone = census.others * p.H;
        if (worker < alone) {
            int which = worker / p.H - census.others_before;
            for (int n = begin; n < end && which >= 0; ++n) {
                if (chunks_of(sequence_bounds(p, n)) >= limit && which-- == 0) {
                    const int item = n * p.H + worker % p.H;
                    store_first(at, {item, 0}), store_last(at, {item + 1, 0});
                }
            }
            return;
        }
    }

    const long long quota = max(even_share(workers - alone), static_cast<long long>(census.longest + kItemCost));
    if (thread == 0) store_u32(at + share::kStep, 1), store_u32(at + share::kTooLong, limit);
    const auto find = [&](long long boundary, auto store) {
        if (boundary >= census.total * p.H) {
            if (thread == 0) store(at, Boundary{items, 0});
            return;
        }
        long long from = census.before * p.H;
        for (int n = begin; n < end && from <= boundary; ++n) {
            const int chunks = chunks_of(sequence_bounds(p, n));
            if (chunks >= limit) continue;
            const long long to = from + static_cast<long long>(p.H) * (chunks + kItemCost);
            if (boundary < to) store(at, boundary_in(p, n, chunks, boundary - from));
            from = to;
        }
    };
    find((worker - alone) * quota, store_first);
    find((worker - alone + 1) * quota, store_last);
}

}  // namespace flash_kda
