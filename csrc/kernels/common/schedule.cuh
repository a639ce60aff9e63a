// Which items a team works through, and in which order. A team is a block, or two blocks of a cluster that share their work.
//
// Whole sequences (Pass::kWhole) are shared out evenly, whatever their lengths, by McNaughton's wrap-around rule. All items (a sequence's heads, then
// the next sequence's) lie one after the other on an axis, each as long as its chunks plus what an item costs besides. Team i works through
// [iQ, (i+1)Q), with Q the larger of an even share and the longest item. An item that crosses a boundary is cut there: its earlier tokens are the
// first thing that the team after the boundary does, its later tokens the last thing of the team before, which gets the state through global memory. They
// cannot overlap, for no item is longer than Q. The state is handed over in fp32, so that cutting changes no bit.
//
// Teams are numbered against the order of blocks: a team waits for the one after it, whose blocks have been started before its own.
#pragma once

#include "kernels/common/ptx.cuh"
#include "kernels/common/ring.h"
#include "kernels/common/schedule.h"

namespace flash_kda {

// One sequence of one head, or a part of one: what a team works through from an initial to a final state.
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

// A team's share, in shared memory, words: items first, first + step, ... before last; how many chunks at the end of the first item are not this
// team's; how many at the end of item `last` are; the team.
namespace share {
inline constexpr int kFirst = 0, kLast = 4, kStep = 8, kFirstCut = 12, kLastCut = 16;
inline constexpr int kTeam = 20;                // three words
inline constexpr int kSums = 64;                // room to find it: 64 bits a warp
inline constexpr int kMaxima = kSums + 16 * 8;  // 32 bits a warp
static_assert(kMaxima + 16 * 4 <= kScheduleBytes);
}  // namespace share

struct Team {
    int number;
    int rank;   // of this block in it
    bool pair;  // two blocks, each with half of the rows of V
};

__device__ __forceinline__ Team load_team(uint32_t at) {
    at += share::kTeam;
    return {static_cast<int>(load_u32(at)), static_cast<int>(load_u32(at + 4)), load_u32(at + 8) != 0};
}

// Number `index` of a launch over segments. The sequences are batch rows, or there is one.
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

// The items of a team, one after the other. `at`: address of its share.
struct Walk {
    int number;

    __device__ __forceinline__ explicit Walk(int number_) : number(number_) {}

    __device__ __forceinline__ bool next(const ForwardParams& p, uint32_t at, Item& item) {
        const int last = uniform(load_u32(at + share::kLast)), last_cut = uniform(load_u32(at + share::kLastCut));
        if (number > last || (number == last && last_cut == 0)) return false;
        if (p.pass != Pass::kWhole) {
            item = find_segment(p, number);
        } else {
            const int sequence = number / p.H;
            const int2 bounds = sequence_bounds(p, sequence);
            item = {sequence, number - sequence * p.H, p.cu_seqlens == nullptr ? sequence : 0, uniform(bounds.x), uniform(bounds.y - bounds.x)};
            if (number == last) {
                const int before = (item.count() - last_cut) * kChunkTokens;
                item.first += before, item.tokens -= before, item.taken_over = load_team(at).number + 1;
            } else if (number == uniform(load_u32(at + share::kFirst))) {
                const int cut = uniform(load_u32(at + share::kFirstCut));
                if (cut > 0) item.tokens = (item.count() - cut) * kChunkTokens, item.handed_on = load_team(at).number;
            }
        }
        number += uniform(load_u32(at + share::kStep));
        return true;
    }
};

namespace schedule {

// Where a boundary lies: `cut` chunks of item `item` are left of it, or none.
struct Boundary {
    int item, cut;
};

// The one at `at` chunks into the items of a sequence. Without cuts, at the nearer end of the item.
__device__ __forceinline__ Boundary boundary_in(const ForwardParams& p, int sequence, int chunks, long long at, bool may_cut) {
    const int head = static_cast<int>(at / (chunks + kItemCost)), item = sequence * p.H + head;
    const int left = static_cast<int>(at - static_cast<long long>(head) * (chunks + kItemCost)) - kItemCost;
    if (may_cut && left >= kLeastPart && chunks - left >= kLeastPart) return {item, left};
    return {2 * left < chunks ? item : item + 1, 0};
}

__device__ __forceinline__ void store_boundary(uint32_t at, int side, const Boundary& boundary) {
    store_u32(at + (side == 0 ? share::kFirst : share::kLast), boundary.item);
    store_u32(at + (side == 0 ? share::kFirstCut : share::kLastCut), boundary.cut);
}

}  // namespace schedule

// Finds this block's team and its share, by all threads of the block; `at`: kScheduleBytes of shared memory, the share in front. A block-wide barrier must
// follow before the share is read.
template <class Config>
__device__ __forceinline__ void find_share(const ForwardParams& p, uint32_t at) {
    using namespace schedule;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, blocks = gridDim.x;
    const auto form_team = [&](bool pair) {
        const int block = blockIdx.x, number = (blocks >> pair) - 1 - (block >> pair);
        if (thread == 0) {
            store_u32(at + share::kTeam, number);
            store_u32(at + share::kTeam + 4, pair ? block % 2 : 0);
            store_u32(at + share::kTeam + 8, pair);
        }
        return number;
    };
    if (p.pass != Pass::kWhole) {
        const bool pair = Config::kPairs && p.pairing == 1;
        const int team = form_team(pair);
        if (thread == 0) {
            const int parts = p.pass == Pass::kSegments ? p.segments : 2 * p.segments - 3;
            store_boundary(at, 0, {team, 0});
            store_boundary(at, 1, {p.N * p.H * parts, 0});
            store_u32(at + share::kStep, blocks >> pair);
        }
        return;
    }

    // A thread looks at a run of sequences; prefixes come from a scan over threads.
    const bool offsets = p.cu_seqlens != nullptr;
    const int run = (p.N + Config::kThreads - 1) / Config::kThreads, begin = min(thread * run, p.N), end = min(begin + run, p.N);
    long long before, total;  // chunks and items' costs, of one head: of the sequences before this thread's, of all
    int longest;
    if (offsets) {
        const uint32_t sums = at + share::kSums, maxima = at + share::kMaxima;
        long long mine = 0;
        longest = 0;
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
            store_u32(sums + warp * 8, static_cast<uint32_t>(sum)), store_u32(sums + warp * 8 + 4, static_cast<uint32_t>(sum >> 32));
            store_u32(maxima + warp * 4, longest);
        }
        __syncthreads();
        total = 0, before = sum - mine;
        for (int w = 0; w < Config::kWarps; ++w) {
            const long long its = load_u32(sums + w * 8) | static_cast<long long>(load_u32(sums + w * 8 + 4)) << 32;
            if (w < warp) before += its;
            total += its, longest = max(longest, static_cast<int>(load_u32(maxima + w * 4)));
        }
    } else {
        longest = chunks_of({0, p.T});
        before = static_cast<long long>(begin) * (longest + kItemCost), total = static_cast<long long>(p.N) * (longest + kItemCost);
    }

    const int items = p.N * p.H;
    const auto even_share = [&](int teams) { return (total * p.H + teams - 1) / teams; };
    const auto time = [&](int teams) {
        return items <= teams ? longest + kItemCost : max(even_share(teams), static_cast<long long>(longest + kItemCost));
    };
    const bool pair = Config::kPairs && (p.pairing == 1 || (p.pairing == 2 && time(blocks / 2) * kPairStep < time(blocks) * 16));
    const int team = form_team(pair);
    const int teams = blocks >> pair;
    if (thread == 0) store_u32(at + share::kStep, 1);
    if (items <= teams) {
        if (thread == 0) {
            store_boundary(at, 0, {min(team, items), 0});
            store_boundary(at, 1, {min(team + 1, items), 0});
        }
        return;
    }
    const bool may_cut = p.handoff_states != nullptr && even_share(teams) >= kLeastShare;
    const long long quota = max(even_share(teams), static_cast<long long>(longest + kItemCost));
#pragma unroll
    for (int side = 0; side < 2; ++side) {
        const long long boundary = (team + side) * quota;
        if (boundary >= total * p.H) {
            if (thread == 0) store_boundary(at, side, {items, 0});
        } else if (!offsets) {
            const long long row = static_cast<long long>(p.H) * (longest + kItemCost);
            const int n = static_cast<int>(boundary / row);
            if (thread == 0) store_boundary(at, side, boundary_in(p, n, longest, boundary - n * row, may_cut));
        } else {
            long long from = before * p.H;
            for (int n = begin; n < end && from <= boundary; ++n) {
                const int chunks = chunks_of(sequence_bounds(p, n));
                const long long to = from + static_cast<long long>(p.H) * (chunks + kItemCost);
                if (boundary < to) store_boundary(at, side, boundary_in(p, n, chunks, boundary - from, may_cut));
                from = to;
            }
        }
    }
}

}  // namespace flash_kda
