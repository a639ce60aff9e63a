// One slot of the shared-memory ring: the operands of one 16-token chunk, prepared in place over the raw tiles.
// Shared by host (sizes) and device. Offsets in bytes; every panel is 64 channels of 128 bytes, 128-byte swizzled as TMA does:
// element (row, ch) of a panel lies at row*128 + (((ch/8) ^ (row%8)) * 16) + (ch%8)*2.
#pragma once

namespace flash_kda::slot {

inline constexpr int kPanelRows = 16;
inline constexpr int kPanelChannels = 64;
inline constexpr int kPanelBytes = kPanelRows * kPanelChannels * 2;
// Per 64-channel panel: 16 rows of k, then 16 rows of q, so that [K~ ; Q~] is one 32-row operand.   raw k, q -> K~, Q~
inline constexpr int kKey = 0;
inline constexpr int kQuery = kPanelBytes;
inline constexpr int kKeyQueryPanelStride = 2 * kPanelBytes;
// Two panels of 16 rows.                                                                             raw g -> K-
inline constexpr int kGate = 4 * kPanelBytes;
inline constexpr int kKeyMinus = kGate;
// Two panels of 16 rows.                                                                             raw v -> O
inline constexpr int kValue = 6 * kPanelBytes;
inline constexpr int kOut = kValue;
inline constexpr int kPanelStride = kPanelBytes;
// lower(Q~ K^^T), [t][s], bf16: four 8x8 blocks, block (t/8, s/8) at index 2*(t/8) + s/8. The upper right one, zero, is neither written nor used.
inline constexpr int kScores = 8 * kPanelBytes;
inline constexpr int kScoresBlockBytes = 8 * 8 * 2;
// T, [t][s], fp32: three 8x8 blocks, upper left, lower left, lower right.
inline constexpr int kTransform = kScores + 4 * kScoresBlockBytes;
inline constexpr int kTransformBlockBytes = 8 * 8 * 4;
// A_C: 128 fp32. Channel ch at float (ch/16)*16 + (ch%8/2)*4 + (ch%16/8)*2 + ch%2: what one lane of the state's
// fragment layout needs for 16 channels is one 16-byte word.
inline constexpr int kDecay = kTransform + 4 * kTransformBlockBytes;
inline constexpr int kBytes = kDecay + 512;
inline constexpr int kLoadBytes = 8 * kPanelBytes;  // q, k, v, g
inline constexpr int kAlignment = 1024;             // the swizzle's period
static_assert(kBytes % kAlignment == 0);

}  // namespace flash_kda::slot
