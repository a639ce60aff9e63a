// Shape of the Hopper kernel: shared by its source and by the host code that launches it.
#pragma once

#include "kernels/common/ring.h"

namespace flash_kda::sm90 {

using Usual = Ring<11, 7, true>;
static_assert(Usual::kWarps == 16, "four warpgroups: two scan, two prepare and move");
static_assert(Usual::kDynamicSharedBytes <= 227 * 1024);
// 512 threads start with 128 registers each; the scan warpgroups take 24 from each of the others.
inline constexpr int kScanRegisters = 152;
inline constexpr int kFeedRegisters = 104;
static_assert(kScanRegisters + kFeedRegisters == 2 * 128);

}  // namespace flash_kda::sm90
