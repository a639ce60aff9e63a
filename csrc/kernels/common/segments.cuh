// Few and long sequences: each head of one is cut into segments, one a block, which work at the same time.
//
// The state after some tokens is affine in the state S before them: S P + B. So the states at the starts of segments can be found without going through all tokens
// before them in turn:
//   1. If the gates seem to forget within a few tokens, each block tries a window before its segment (forget.cuh) and goes on into the segment. Once all blocks of
//      a head know that nothing is left of the state before their windows, each finishes its segment, and that is all.
//   2. Else the tokens before the last segment are cut into stretches (segments.h), scanned side by side for their states alone: the first one from the initial
//      state, each further one from zero, which gives B, and from the identity with v = 0, which gives P. Both are saved at each start of a segment on the way.
//   3. The states after stretches are chained, S_s = S_{s-1} P_s + B_s, 16 rows of V by one block each, and by one more such product each block finds the state
//      at the start of its segment. Meanwhile its ring fills with the segment's first chunks.
// All of it is decided on the device, for each head by itself. Blocks wait for one another, so all must be resident: a cooperative launch.
#pragma once

#include "kernels/common/forget.cuh"
#include "kernels/common/segments.h"

namespace flash_kda {

// A block's place among the blocks of its sequence and head.
struct Cut {
    int sequence, head, segment;
    int first_block, stride;

    __device__ __forceinline__ explicit Cut(const ForwardParams& p) {
        const int each = p.H * p.segments;
        sequence = blockIdx.x / each, head = blockIdx.x % p.H, segment = blockIdx.x % each / p.H;
        first_block = sequence * each + head, stride = p.H;
    }
    // That has a segment, and room for states.
    __device__ __forceinline__ int block(int its_segment) const { return first_block + its_segment * stride; }
};

// Signals are the launch's ticket, doubled, plus an answer. They are cleared at the end, for a replayed graph comes with the same ticket.
namespace signal {
// Of a block: whether the state before its window is forgotten (of the first: that the initial state has been read); its scans' states are saved; it waits for
// nothing any more.
inline constexpr int kForgotten = 0, kScanned = 1, kEnded = 2;

__device__ __forceinline__ unsigned long long* of(const ForwardParams& p, const Cut& cut, int segment, int which) {
    return p.signals + cut.block(segment) * kSignals + which;
}
// Rows 16 r to 16 r + 15 of all states after stretches are there.
__device__ __forceinline__ unsigned long long* chained(const ForwardParams& p, const Cut& cut, int r) {
    return p.signals + cut.first_block * kSignals + kOwnSignals + r;
}
__device__ __forceinline__ unsigned long long value(const ForwardParams& p, bool answer = false) {
    return p.ticket << 1 | answer;
}
// By a whole warp, each lane for its flag: until all are given; whether all answer yes. A loop that the lanes leave together, for the compiler keeps in uniform
// registers only what no branch can part.
__device__ __forceinline__ bool await(const ForwardParams& p, const unsigned long long* flag) {
    unsigned long long seen;
    while (!__all_sync(~0u, (seen = observe(flag)) >> 1 == p.ticket)) __nanosleep(20);
    return uniform(__all_sync(~0u, (seen & 1) != 0)) != 0;
}
// Of all blocks of the head.
__device__ __forceinline__ bool await_all(const ForwardParams& p, const Cut& cut, int which) {
    bool yes = true;
    for (int segment = 0; segment < p.segments; segment += 32) {
        yes &= await(p, of(p, cut, min(segment + fresh_lane(), p.segments - 1), which));
    }
    return yes;
}
}  // namespace signal

// Tokens of a sequence from `begin` to `end`, counted from its first one, as far as there are any. In 64 bits for lengths near 2^31.
__device__ __forceinline__ Item find_part(const ForwardParams& p, const Cut& cut, long long begin, long long end) {
    const int2 bounds = sequence_bounds(p, cut.sequence);
    const long long length = bounds.y - bounds.x;
    const int first = static_cast<int>(min(begin, length)), last = static_cast<int>(min(end, length));
    return {cut.sequence, cut.head, p.cu_seqlens == nullptr ? cut.sequence : 0, uniform(bounds.x + first), uniform(max(last - first, 0))};
}

__device__ __forceinline__ long long segment_begin(const ForwardParams& p, int segment) {
    return static_cast<long long>(segment) * p.segment_tokens;
}

// Scan number `scan` of a head: of the first stretch, then those that give B and P of each further one.
__device__ __forceinline__ Item find_scan(const ForwardParams& p, const Cut& cut, int scan) {
    const int stretch = (scan + 1) / 2;
    const long long begin = static_cast<long long>(stretch) * p.stretch_tokens;
    Item item = find_part(p, cut, begin, min(begin + p.stretch_tokens, segment_begin(p, p.segments - 1)));
    item.stretch = stretch;
    item.transition = scan > 0 && scan % 2 == 0;
    return item;
}

// A block's way, the same for all its roles.
struct SegmentWalk {
    enum Step : int { kBegin, kIdentityWindow, kZeroWindow, kHead, kRest, kScan, kSecondScan, kSegment, kEnd };
    int step;  // of the item found last

    __device__ __forceinline__ explicit SegmentWalk(int step_) : step(step_) {}

    // `at`: of the share, which says whether the block tries windows.
    __device__ __forceinline__ bool next(const ForwardParams& p, uint32_t at, Item& item) {
        const Cut cut(p);
        step = step >= kSegment || step == kRest ? kEnd : step + 1;
        if (step < kRest && share::word(at, share::kWindows) == 0) step = kScan;
        if (step < kHead && cut.segment == 0) step = kHead;
        if (step == kRest && !share::goes_on(at)) step = kScan;
        if (step == kSecondScan && (p.segments % 2 != 0 || cut.segment < p.segments - 1)) step = kSegment;
        if (step == kEnd) return false;

        if (step == kScan || step == kSecondScan) {
            item = find_scan(p, cut, cut.segment + (step == kSecondScan));
            return true;
        }
        // Of the segment, before it is known whether to finish it: about what the ring holds besides the windows; less of a short one, for it may be in vain.
        const int head = min(max(p.segment_tokens - 4 * kChunkTokens, 4 * kChunkTokens), 8 * kChunkTokens);
        const long long begin = segment_begin(p, cut.segment), end = cut.segment == p.segments - 1 ? 1ll << 31 : begin + p.segment_tokens;
        item = find_part(p, cut, step == kRest ? begin + head : begin, step == kHead ? min(end, begin + head) : end);
        if (step < kHead) {
            item.first -= kWindowTokens, item.tokens = kWindowTokens;
            item.window = true, item.transition = step == kIdentityWindow;
        }
        return true;
    }
};

// Sees at a block's start whether to try windows: before its segment; before the first one's there is none, but the others' will be in vain unless the state is
// forgotten after it. By all threads, followed by a barrier.
template <class Config>
__device__ __forceinline__ void survey_segment(const ForwardParams& p, uint32_t at, uint32_t scratch) {
    const Cut cut(p);
    const Item item = find_part(p, cut, segment_begin(p, max(cut.segment, 1)), 1ll << 31);
    const bool tries =
        item.first - sequence_bounds(p, cut.sequence).x >= kWindowTokens && seems_forgotten<Config>(p, scratch, item.batch, item.first, item.head);
    if (threadIdx.x == 0) store_u32(at + share::kWindows, tries);
    if (threadIdx.x < 32 && !tries) publish(signal::of(p, cut, cut.segment, signal::kForgotten), signal::value(p, false), threadIdx.x == 0);
}

// By a warp of the first block of a head: waits until no block waits any more, and clears the signals.
__device__ __forceinline__ void clear_signals(const ForwardParams& p, const Cut& cut) {
    signal::await_all(p, cut, signal::kEnded);
    for (int i = threadIdx.x; i < p.segments * kSignals; i += 32) p.signals[cut.block(i / kSignals) * kSignals + i % kSignals] = 0;
}

}  // namespace flash_kda
