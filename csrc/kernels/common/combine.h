// Shape of the kernel that chains segments: shared by its source and by the host code that launches it.
#pragma once

#include "kernels/common/params.h"

namespace flash_kda {

inline constexpr int kCombineRows = 8;
inline constexpr int kCombineBlocks = kHeadDim / kCombineRows;
inline constexpr int kCombineParts = 4;  // of the sum over the inner channels
inline constexpr int kCombineThreads = kCombineParts * kHeadDim;
inline constexpr const char* kCombineEntry = "flash_kda_combine";

}  // namespace flash_kda
