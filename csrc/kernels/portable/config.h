// Shape of the portable kernel: shared by its source and by the host code that launches it.
#pragma once

#include "kernels/common/ring.h"

namespace flash_kda::portable {

// Up to 16 warps leave 128 registers to each. Wide needs the 227 KiB a block can have on sm_90, sm_100 and sm_103; narrow fits sm_120's 99 KiB.
using Wide = Ring<11, 7, true>;
using Narrow = Ring<5, 4, false>;
static_assert(Wide::kDynamicSharedBytes <= 227 * 1024 && Narrow::kDynamicSharedBytes <= 99 * 1024);

}  // namespace flash_kda::portable
