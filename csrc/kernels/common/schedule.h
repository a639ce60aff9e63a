// What the sharing out of items (schedule.cuh) knows of costs: shared with the host code that provides for it.
#pragma once

namespace flash_kda {

// In chunks: what an item costs besides its own (its states are loaded and stored while nothing else goes on).
inline constexpr int kItemCost = 4;
// In chunks: shorter parts, and parts of smaller shares, are not worth a cut.
inline constexpr int kLeastPart = 8;
inline constexpr int kLeastShare = 64;

}  // namespace flash_kda
