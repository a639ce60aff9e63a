// The scan warps' way through a block's items, whatever takes the state from chunk to chunk.
#pragma once

#include "kernels/common/pipeline.cuh"
#include "kernels/common/state.cuh"

namespace flash_kda {

// Where states are saved on the way, before an item's first chunk, between two and after the last: saves the state if it is wanted there, and returns how
// many chunks to do until the next such pause; 0 at the end.
template <class Config>
__device__ __forceinline__ int pause(const ForwardParams& p, const Block<Config>& block, const State& s) {
    const int left = uniform(load_u32(left_at(block)));
    const KeptSaves saves = kept_saves(block);
    // One loop, so that the stores are there once.
#pragma unroll 1
    for (int which = 0; which <= kMostMarks; ++which) save_state(s, save_place(p, saves, which), threadIdx.x / 32, fresh_lane());
    const int next = left > 0 ? next_save(p, saves) : 0;
    __syncwarp();
    store_u32(left_at(block), left - next);
    __syncwarp();
    return next;
}

// After the window that gives P, by all scan warps: whether P is negligible (forget.cuh).
__device__ __forceinline__ bool negligible(const State& s) {
    bool large = false;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
        for (int r = 0; r < 4; ++r) large |= !(fabsf(s[j][r]) <= kNegligible);  // a NaN is not
    }
    return !any_scan_warp(large);
}

// kSaves: states are saved on the way. Compiled twice, so that the loop of those who want none keeps its registers.
template <bool kSaves, class Config, class Chunks>
__device__ __forceinline__ void scan_items(const ForwardParams& p, const Block<Config>& block, const Chunks& scan_chunks) {
    Place<Config> place = block.first_place();
    Walk walk = block.items();
    State s;
    for (Item item; block.next_item(p, walk, item);) {
        keep(block, final_place(p, item), walk, item.window && item.transition, item.count());
        if (kSaves) keep_saves(block, p, item);
        // After windows the state is there already, if what it was before them proved to be forgotten. (With saves there are none.)
        const bool there = !kSaves && item.led_up_to && uniform(load_u32(forgotten_at(block))) != 0;
        if (!there) {
            const int warp = threadIdx.x / 32, lane = fresh_lane();  // not kept through the loop
            if (item.taken_over >= 0) wait_for_handoff(p, item.taken_over, warp, lane);
            start_state(s, initial_place(p, item), item.transition, warp, lane);
        }
        if (kSaves) {
            while (const int left = pause(p, block, s)) scan_chunks(s, place, left);
        } else {
            scan_chunks(s, place, item.count());
        }
        const auto [final, walk_on, to_judge] = kept(block);
        walk = walk_on;
        const int warp = threadIdx.x / 32, lane = fresh_lane();
        save_state(s, final, warp, lane);
        if (final.handoff) announce_handoff(p, final.number, warp, lane);
        if (!kSaves && to_judge) store_u32(forgotten_at(block), negligible(s));
    }
    // A state that was not waited for has been handed on all the same, and its flag must be cleared: a replayed graph comes with the same ticket.
    if (!kSaves && p.may_forget && block.share(share::kWindows) != 0 && uniform(load_u32(forgotten_at(block))) != 0) {
        wait_for_handoff(p, block.share(share::kWorker) + 1, threadIdx.x / 32, fresh_lane());
    }
}

template <class Config, class Chunks>
__device__ __forceinline__ void scan(const ForwardParams& p, const Block<Config>& block, const Chunks& scan_chunks) {
    if constexpr (Config::kGeneral) {
        if (p.saves) return scan_items<true>(p, block, scan_chunks);
    }
    scan_items<false>(p, block, scan_chunks);
}

}  // namespace flash_kda
