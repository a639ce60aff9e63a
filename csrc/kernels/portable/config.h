// Shape of the portable kernel: shared by its source and by the host code that launches it.
#pragma once

#include "kernels/common/ring.h"

namespace flash_kda::portable {

// Up to 16 warps leave 128 registers to each. Wide needs the 227 KiB a block can have on sm_90, sm_100 and sm_103; narrow fits sm_120's 99 KiB.
using Wide = Ring<11, 7>;
using Narrow = Ring<5, 4>;
static_assert(Wide::kDynamicSharedBytes <= 227 * 1024 && Narrow::kDynamicSharedBytes <= 99 * 1024);
inline constexpr const char* kWideEntry = "flash_kda_forward_portable_wide";
inline constexpr const char* kWideGeneralEntry = "flash_kda_forward_portable_wide_general";
inline constexpr const char* kNarrowEntry = "flash_kda_forward_portable_narrow";
inline constexpr const char* kNarrowGeneralEntry = "flash_kda_forward_portable_narrow_general";

}  // namespace flash_kda::portable
