// Shape of the portable kernel: shared by its source and by the host code that launches it.
#pragma once

#include "kernels/common/params.h"
#include "kernels/common/slot.h"

namespace flash_kda::portable {

#ifndef FLASH_KDA_PORTABLE_STAGES
#define FLASH_KDA_PORTABLE_STAGES 5
#endif
#ifndef FLASH_KDA_PORTABLE_PREPARE_WARPS
#define FLASH_KDA_PORTABLE_PREPARE_WARPS 4
#endif

// Five slots and the rest fit the 99 KiB that sm_120 gives to a block.
inline constexpr int kStages = FLASH_KDA_PORTABLE_STAGES;
inline constexpr int kScanWarps = kHeadDim / 16;  // each owns 16 rows of V of the state
inline constexpr int kPrepareWarps = FLASH_KDA_PORTABLE_PREPARE_WARPS;
inline constexpr int kWarps = kScanWarps + kPrepareWarps + 1;  // the last one moves data
inline constexpr int kThreads = kWarps * 32;

// Row stride of the fp32 matrix in a prepare warp's scratch: 20 floats keep its fragment stores at two lanes a bank.
inline constexpr int kScratchStride = 20;
inline constexpr int kScratchBytes = kChunkTokens * kScratchStride * 4;
inline constexpr int kBarriersPerStage = 3;

inline constexpr int kBiasOffset = kStages * slot::kBytes;
inline constexpr int kScratchOffset = kBiasOffset + kHeadDim * 4;
inline constexpr int kBarrierOffset = kScratchOffset + kPrepareWarps * kScratchBytes;
inline constexpr int kSharedBytes = kBarrierOffset + kStages * kBarriersPerStage * 8;
// Dynamic shared memory starts at an address that the compiler may not place on 1024 bytes: room to align.
inline constexpr int kDynamicSharedBytes = kSharedBytes + slot::kAlignment;
inline constexpr const char* kEntryPoint = "flash_kda_forward_portable";

}  // namespace flash_kda::portable
