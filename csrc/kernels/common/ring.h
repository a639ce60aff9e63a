// Shared-memory plan of a forward kernel: shared by its source and by the host code that launches it.
#pragma once

#include "kernels/common/params.h"
#include "kernels/common/slot.h"

namespace flash_kda {

inline constexpr int kScanWarps = kHeadDim / 16;  // each owns 16 rows of V of the state
// A prepare warp's scratch: a 16x16 fp32 matrix, whose row stride of 20 floats keeps transposed fragment stores free of bank conflicts. The
// four spare floats of rows 0-3 hold 16 more values.
inline constexpr int kScratchStride = 20;
inline constexpr int kBiasOffset = kChunkTokens * kScratchStride * 4;  // then the head's gate bias
inline constexpr int kScratchBytes = kBiasOffset + kHeadDim * 4;
inline constexpr int kBarriersPerStage = 3;
// What each scan warp keeps while it goes through an item: its final place and walk, where to save states on the way, the chunks left; and until the next
// item but one, what a window has proved.
inline constexpr int kKeptBytes = 64, kKeptSaves = 20, kKeptLeft = 48, kKeptForgotten = 52;
inline constexpr int kScheduleBytes = 320;           // schedule.cuh
inline constexpr int kExchangeBytes = 16 * 144 * 4;  // chain.cuh

// kGeneral: takes every form of input. Without it, what most calls are: see ForwardParams::general. They are compiled apart because the code of both
// together outgrows the instruction cache, at a fifth of the speed. kSegments: for sequences that are cut into segments (segments.cuh).
// kExchange: there is room in shared memory for what warps exchange when they chain states (chain.cuh).
template <int kStages_, int kPrepareWarps_, bool kExchange_, bool kGeneral_ = false, bool kSegments_ = false>
struct Ring {
    // Fewer than three slots and the scan, which waits for the next chunk before it hands over the last, would wait for ever.
    static_assert(kStages_ >= 3 && kPrepareWarps_ <= kStages_);
    static constexpr bool kGeneral = kGeneral_, kSegments = kSegments_, kExchange = kExchange_;
    using General = Ring<kStages_, kPrepareWarps_, kExchange_, true, kSegments_>;
    using Segments = Ring<kStages_, kPrepareWarps_, kExchange_, kGeneral_, true>;
    static constexpr int kStages = kStages_;  // slots of the ring
    static constexpr int kPrepareWarps = kPrepareWarps_;
    static constexpr int kWarps = kScanWarps + kPrepareWarps + 1;  // the last one moves data
    static constexpr int kThreads = kWarps * 32;
    static_assert(kThreads * 4 <= kPrepareWarps * kScratchBytes);  // forget.cuh

    static constexpr int kScratchOffset = kStages * slot::kBytes;
    static constexpr int kBarrierOffset = kScratchOffset + kPrepareWarps * kScratchBytes;
    static constexpr int kFlagOffset = kBarrierOffset + kStages * kBarriersPerStage * 8;
    static constexpr int kKeptOffset = (kFlagOffset + kStages * 4 + 15) / 16 * 16;
    static constexpr int kScheduleOffset = kKeptOffset + kScanWarps * kKeptBytes;
    static constexpr int kExchangeOffset = kScheduleOffset + kScheduleBytes;
    static constexpr int kSharedBytes = kExchangeOffset + (kExchange ? kExchangeBytes : 0);
    // Dynamic shared memory starts at an address that the compiler may not place on 1024 bytes: room to align.
    static constexpr int kDynamicSharedBytes = kSharedBytes + slot::kAlignment;
};

}  // namespace flash_kda
