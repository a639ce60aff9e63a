// The scan warps' way through a segment (segments.cuh), whatever takes the state from chunk to chunk.
#pragma once

#include "kernels/common/chain.cuh"
#include "kernels/common/scan.cuh"

namespace flash_kda {

// Of a scan for states alone: whether segment `next` starts in its stretch, or at its end.
__device__ __forceinline__ bool stops_for(const ForwardParams& p, const Item& scan, int next) {
    return next < p.segments && segment_begin(p, next) <= (scan.stretch + 1ll) * p.stretch_tokens;
}

// After how many of its chunks it stops next: there, or at its end.
__device__ __forceinline__ int next_stop(const ForwardParams& p, const Item& scan, int next) {
    if (!stops_for(p, scan, next)) return scan.count();
    const long long chunks = (segment_begin(p, next) - static_cast<long long>(scan.stretch) * p.stretch_tokens) / kChunkTokens;
    return static_cast<int>(min(chunks, static_cast<long long>(scan.count())));
}

// Where it leaves what it has made of zero or, transposed, of the identity.
__device__ __forceinline__ StatePlace stop_place(const ForwardParams& p, const Cut& cut, const Item& scan, int next) {
    if (stops_for(p, scan, next)) {
        return {scan.transition ? p.segment_transitions : p.segment_states, cut.block(next), true, false, scan.transition};
    }
    if (scan.stretch == stretch_count(p.segments) - 1) return {};
    return {scan.transition ? p.stretch_transitions : p.stretch_states, cut.block(scan.stretch), true, false, scan.transition};
}

// By one scan warp: whether all blocks of the head go on with their segments, for all roles to see.
template <class Config>
__device__ __forceinline__ void decide(const ForwardParams& p, const Block<Config>& block, const Cut& cut) {
    const uint32_t at = block.base + Config::kScheduleOffset;
    const bool goes_on = signal::await_all(p, cut, signal::kForgotten);
    if (goes_on) publish(signal::of(p, cut, cut.segment, signal::kEnded), signal::value(p), threadIdx.x == 0);
    store_u32(at + share::kGoesOn, goes_on);
    __syncwarp();
    if (cute::elect_one_sync()) barrier_arrive(at + share::kDecided);
}

// What a scan warp needs again after chunks: its step, and of a scan for states the chunks done and the segment that starts next.
struct KeptStep {
    int step, done, next;
};

template <class Config>
__device__ __forceinline__ void keep(const Block<Config>& block, const KeptStep& kept) {
    const uint32_t at = block.base + Config::kKeptOffset + threadIdx.x / 32 * kKeptBytes;
    store_u32(at, kept.step), store_u32(at + 4, kept.done), store_u32(at + 8, kept.next);
    __syncwarp();
}

template <class Config>
__device__ __forceinline__ KeptStep kept_step(const Block<Config>& block) {
    const uint32_t at = block.base + Config::kKeptOffset + threadIdx.x / 32 * kKeptBytes;
    const KeptStep kept = {uniform(load_u32(at)), uniform(load_u32(at + 4)), uniform(load_u32(at + 8))};
    __syncwarp();
    return kept;
}

// `scan_chunks`: the next chunks of an item; `scan_states`: without outputs.
template <class Config, class Chunks, class States>
__device__ __forceinline__ void scan_segment(const ForwardParams& p, const Block<Config>& block, const Chunks& scan_chunks,
                                             const States& scan_states) {
    Place<Config> place = block.first_place();
    SegmentWalk walk = block.items();
    State s;
    for (Item item; block.next_item(p, walk, item);) {
        const Cut cut(p);
        KeptStep at = {walk.step, 0, 0};
        if (at.step == SegmentWalk::kSegment) {
            chain_states(s, p, cut,
                         Config::kExchange ? reinterpret_cast<float*>(shared_pointer(block.base + Config::kExchangeOffset))
                                           : p.exchange + blockIdx.x * (kExchangeBytes / 4));
        } else if (at.step != SegmentWalk::kRest && (at.step != SegmentWalk::kHead || cut.segment == 0)) {
            const bool at_start = at.step == SegmentWalk::kHead || item.stretch == 0;
            start_state(s, at_start ? place_of(p, p.initial, item) : StatePlace{}, item.transition, threadIdx.x / 32, fresh_lane());
        }  // else it is there from the item before
        if (at.step == SegmentWalk::kHead && cut.segment == 0) {
            signal_together(signal::of(p, cut, 0, signal::kForgotten), signal::value(p, true));  // the initial state has been read
        }
        if (item.stretch >= 0) {
            // The initial state is read again at the first segment, when another block may have stored the final one over it.
            if (item.stretch == 0) save_state(s, {p.segment_states, cut.block(0), true}, threadIdx.x / 32, fresh_lane());
            at.next = static_cast<int>(item.stretch * static_cast<long long>(p.stretch_tokens) / p.segment_tokens) + 1;
            for (bool more = true; more; ++at.next) {
                const int done = at.done;
                at.done = next_stop(p, item, at.next);
                keep(block, at);
                scan_states(s, place, at.done - done);
                at = kept_step(block);
                const Cut cut(p);
                item = find_scan(p, cut, cut.segment + (at.step == SegmentWalk::kSecondScan));
                more = stops_for(p, item, at.next);
                save_state(s, stop_place(p, cut, item, at.next), threadIdx.x / 32, fresh_lane());
            }
        } else {
            keep(block, at);
            scan_chunks(s, place, item.count());
            at = kept_step(block);
            const Cut cut(p);
            if (at.step == SegmentWalk::kIdentityWindow) {
                publish(signal::of(p, cut, cut.segment, signal::kForgotten), signal::value(p, negligible(s)), threadIdx.x == 0);
            }
            // As late as the ring lets the other roles run ahead without knowing.
            if (uniform(threadIdx.x / 32) == 0 && at.step == (cut.segment == 0 ? SegmentWalk::kHead : SegmentWalk::kZeroWindow))
                decide(p, block, cut);
            if ((at.step == SegmentWalk::kRest || at.step == SegmentWalk::kSegment) && cut.segment == p.segments - 1) {
                Item whole = {};
                whole.sequence = cut.sequence, whole.head = cut.head;
                save_state(s, place_of(p, p.final, whole), threadIdx.x / 32, fresh_lane());
            }
        }
        walk = SegmentWalk(at.step);
    }
    const Cut cut(p);
    if (cut.segment == 0 && threadIdx.x < 32) clear_signals(p, cut);
}

}  // namespace flash_kda
