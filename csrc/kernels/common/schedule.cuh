// Which items a block works through, and in which order. A worker is a block; they are numbered against the order of blocks.
//
// Whole sequences. (Those that are cut into segments: segments.cuh.) Items that cannot be cut, for they or the shares are short, are dealt out in turn. Else
// items are shared out evenly,
// whatever their lengths: they (a sequence's heads, then the next sequence's) lie one after the other on an axis, each as long as its chunks plus what an
// item costs besides, and worker i takes [iQ, (i+1)Q), with Q an even share (McNaughton's wrap-around rule). An item that crosses a boundary is cut there:
// its earlier tokens are the first thing that the worker after the boundary does, its later tokens the last thing of the worker before, which gets the
// state through global memory, in fp32: cutting changes no bit. An item no longer than Q never waits for itself. A longer one spans several workers, one
// after the other, and takes as long as it would alone; unless its state is forgotten before a cut (forget.cuh): then its parts run at once.
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
    bool transition = false;              // find P: start from the identity, v = 0
    int taken_over = -1, handed_on = -1;  // boundary at which the state before, or after it, changes hands
    bool window = false;                  // only leads up to the next item (forget.cuh): nothing is written
    bool led_up_to = false;               // windows come before
    int stretch = -1;                     // scanned for its states alone (segments.cuh)
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
// block's; how many at the end of item `last` are; the worker's number; how many windows lead up to an item's part; the least chunks of an item for which they are
// worth while.
namespace share {
inline constexpr int kFirst = 0, kLast = 4, kStep = 8, kFirstCut = 12, kLastCut = 16, kWorker = 20, kWindows = 24, kLong = 28;
// With segments: whether all blocks of a head go on with them after their windows, instead of scanning for states; and the barrier that says that it is known.
inline constexpr int kGoesOn = 32, kDecided = 40;
// Room to find it, for each warp.
inline constexpr int kSums = 64, kMaxima = kSums + 16 * 8;
static_assert(kMaxima + 16 * 4 <= kScheduleBytes);

// One word of it, which the compiler then knows to be the same in the whole warp.
__device__ __forceinline__ int word(uint32_t at, int which) {
    return uniform(load_u32(at + which));
}
__device__ __forceinline__ bool goes_on(uint32_t at) {
    barrier_wait(at + kDecided, 0);
    return word(at, kGoesOn) != 0;
}
}  // namespace share

// Part of a sequence of a head.
__device__ __forceinline__ Item find_whole(const ForwardParams& p, int number) {
    const int sequence = number / p.H;
    const int2 bounds = sequence_bounds(p, sequence);
    return {sequence, number - sequence * p.H, p.cu_seqlens == nullptr ? sequence : 0, uniform(bounds.x), uniform(bounds.y - bounds.x)};
}

// The items of a block, one after the other. `at`: address of its share. Everything is the same in the whole warp, and known to be: what depends on an item
// stays in uniform registers.
struct Walk {
    int number;
    int windows = 0;  // that have been gone through

    __device__ __forceinline__ explicit Walk(int number_, int windows_ = 0) : number(number_), windows(windows_) {}

    __device__ __forceinline__ bool next(const ForwardParams& p, uint32_t at, Item& item) {
        const int last = share::word(at, share::kLast), last_cut = share::word(at, share::kLastCut), step = share::word(at, share::kStep);
        if (number > last || (number == last && last_cut == 0)) return false;
        item = find_whole(p, number);
        cut(item, at, last, last_cut);
        const int all_windows = item.taken_over >= 0 ? share::word(at, share::kWindows) : 0;
        if (windows < all_windows) {
            item = {item.sequence, item.head, item.batch, item.first - kWindowTokens, kWindowTokens, windows == 0};
            item.window = true;
            ++windows;
        } else {
            item.led_up_to = all_windows > 0;
            number += step;
        }
        return true;
    }

   private:
    // To what is this block's.
    __device__ __forceinline__ void cut(Item& item, uint32_t at, int last, int last_cut) const {
        const int count = item.count(), worker = share::word(at, share::kWorker);
        if (number == share::word(at, share::kFirst)) {
            const int first_cut = share::word(at, share::kFirstCut);
            if (first_cut > 0) item.tokens = (count - first_cut) * kChunkTokens, item.handed_on = worker;
        }
        if (number == last) {
            const int before = (count - last_cut) * kChunkTokens;
            item.first += before, item.tokens -= before, item.taken_over = worker + 1;
        }
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
    long long before, total;  // of chunks and items' costs, of one head
    int longest;              // in chunks
};

// By all threads of the block, each of which looks at a run of the sequences.
template <class Config>
__device__ __forceinline__ Census count_sequences(const ForwardParams& p, uint32_t at, int begin, int end) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    long long mine = 0;
    int longest = 0;
    for (int n = begin; n < end; ++n) {
        const int chunks = chunks_of(sequence_bounds(p, n));
        mine += chunks + kItemCost, longest = max(longest, chunks);
    }
    long long sum = mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const long long other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
    }
    longest = __reduce_max_sync(~0u, longest);
    if (lane == 31) {
        const uint32_t sums = at + share::kSums + warp * 8;
        store_u32(sums, static_cast<uint32_t>(sum)), store_u32(sums + 4, static_cast<uint32_t>(sum >> 32));
        store_u32(at + share::kMaxima + warp * 4, longest);
    }
    __syncthreads();
    Census census = {sum - mine, 0, 0};
    for (int w = 0; w < Config::kWarps; ++w) {
        const uint32_t sums = at + share::kSums + w * 8;
        const long long its_sum = load_u32(sums) | static_cast<long long>(load_u32(sums + 4)) << 32;
        if (w < warp) census.before += its_sum;
        census.total += its_sum;
        census.longest = max(census.longest, static_cast<int>(load_u32(at + share::kMaxima + w * 4)));
    }
    return census;
}

// Finds this block's share, by all threads of the block; `at`: kScheduleBytes of shared memory, the share in front. A block-wide barrier must follow before
// the share is read.
template <class Config>
__device__ __forceinline__ void find_share(const ForwardParams& p, uint32_t at) {
    using namespace schedule;
    const int thread = threadIdx.x, workers = gridDim.x, worker = workers - 1 - blockIdx.x;
    const int items = p.N * p.H;
    if (thread == 0) {
        store_first(at, {worker, 0}), store_last(at, {items, 0});
        store_u32(at + share::kStep, workers), store_u32(at + share::kWorker, worker), store_u32(at + share::kWindows, 0);
    }
    // Without handing on, or where each has a worker to itself and its parts could only follow one another.
    if (p.handoff_states == nullptr || (items <= workers && !p.may_forget)) return;

    const int run = (p.N + Config::kThreads - 1) / Config::kThreads, begin = min(thread * run, p.N), end = min(begin + run, p.N);
    const Census census = count_sequences<Config>(p, at, begin, end);
    const long long quota = (census.total * p.H + workers - 1) / workers;
    if (census.longest < 2 * kLeastPart || quota < kLeastShare) return;
    if (thread == 0) store_u32(at + share::kStep, 1), store_u32(at + share::kLong, static_cast<int>(min(quota, 1ll << 30)) + kWindowsCost);
    const auto find = [&](long long boundary, auto store) {
        if (boundary >= census.total * p.H) {
            if (thread == 0) store(at, Boundary{items, 0});
            return;
        }
        long long from = census.before * p.H;
        for (int n = begin; n < end && from <= boundary; ++n) {
            const int chunks = chunks_of(sequence_bounds(p, n));
            const long long to = from + static_cast<long long>(p.H) * (chunks + kItemCost);
            if (boundary < to) store(at, boundary_in(p, n, chunks, boundary - from));
            from = to;
        }
    };
    find(worker * quota, store_first);
    find((worker + 1) * quota, store_last);
}

}  // namespace flash_kda
