// How few and long sequences are cut, so that all multiprocessors work on them: shared by the kernels (segments.cuh) and by the host code that provides for them.
#pragma once

#include "kernels/common/params.h"

namespace flash_kda {

// What the tokens before the last segment of a sequence are cut into, to find the states at the starts of segments. Of the first stretch there is one scan, of
// each further one there are two, and each segment's block has one of these scans; with an even number of segments one block has both scans of a last stretch of
// at most half the length. So all blocks scan for the same time.
constexpr int stretch_count(int segments) {
    return segments / 2 + 1;
}

constexpr int scan_count(int segments) {
    return 2 * stretch_count(segments) - 1;
}

// All but the last one have so many.
constexpr int stretch_tokens(int segments, int segment_tokens) {
    const long long chunks = static_cast<long long>(segments - 1) * (segment_tokens / kChunkTokens);
    return static_cast<int>((2 * chunks + segments) / (segments + 1)) * kChunkTokens;
}

// Signals of a block to the others of its sequence and head, and of those that chain 16 rows of the states to all (kept by the first block).
inline constexpr int kOwnSignals = 3, kSignals = kOwnSignals + kHeadDim / 16;

}  // namespace flash_kda
