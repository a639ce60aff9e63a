// What the sharing out of items (schedule.cuh) knows of costs: shared with the host code that provides for it.
#pragma once

#include "kernels/common/params.h"

namespace flash_kda {

// In chunks: what an item costs besides its own (its states are loaded and stored while nothing else goes on).
inline constexpr int kItemCost = 4;
// In chunks: shorter parts, and parts of smaller shares, are not worth a cut.
inline constexpr int kLeastPart = 8;
inline constexpr int kLeastShare = 64;

// Tokens of a window that leads up to a cut (forget.cuh), and what both windows cost, in chunks.
inline constexpr int kWindowTokens = 48;
inline constexpr int kWindowsCost = 2 * kWindowTokens / kChunkTokens + kItemCost;
static_assert(kWindowTokens <= kLeastPart * kChunkTokens);

}  // namespace flash_kda
