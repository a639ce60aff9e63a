#include "host/plan.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels/common/ring.h"
#include "kernels/common/schedule.h"

namespace flash_kda {
namespace {

// Shorter ones do not pay for two more launches and for filling the ring twice.
constexpr int kLeastSegmentTokens = 256;

bool may_split() {
    const char* setting = std::getenv("FLASH_KDA_SPLIT");
    if (setting == nullptr || *setting == 0 || std::strcmp(setting, "auto") == 0) return true;
    if (std::strcmp(setting, "0") == 0) return false;
    throw std::runtime_error(std::string("flash_kda: FLASH_KDA_SPLIT=") + setting + " is unknown; expected auto or 0");
}

Plan plan_segments(int sm_count, int T, int H, int N, bool has_offsets) {
    const long long items = static_cast<long long>(N) * H;
    if (items <= 0 || 3 * items > sm_count || T < 3 * kLeastSegmentTokens || (has_offsets && N > 1) || !may_split()) return {};
    // The first of two passes has 2 * segments - 3 items for each sequence and head: as many segments as still run at once.
    const long long most = (sm_count + 3 * items) / (2 * items);
    const long long wanted = std::min<long long>(most, T / kLeastSegmentTokens);
    if (wanted < 3) return {};  // with two, both passes together take as long as one
    const long long tokens = ((T + wanted - 1) / wanted + kChunkTokens - 1) / kChunkTokens * kChunkTokens;
    const int segments = static_cast<int>((T + tokens - 1) / tokens);
    return {segments, static_cast<int>(tokens), std::size_t{2} * N * segments * H * kHeadDim * kHeadDim * sizeof(float)};
}

std::size_t handoff_bytes(int blocks, int T, int H, int N, bool has_offsets) {
    const long long items = static_cast<long long>(N) * H;
    const long long chunks = (T + kChunkTokens - 1) / kChunkTokens;
    const long long most = (has_offsets ? chunks + N : chunks * N) + static_cast<long long>(N) * kItemCost;  // of one head, with what items cost
    // The device rounds a share up before it compares: hence one less.
    if (items <= blocks || most * H < static_cast<long long>(blocks) * (kLeastShare - 1)) return 0;
    return handoff_flags_offset(blocks) + static_cast<std::size_t>(blocks + 1) * kScanWarps * sizeof(unsigned long long);
}

}  // namespace

Plan plan_call(int sm_count, int T, int H, int N, bool has_offsets, bool whole) {
    Plan plan = whole ? Plan{} : plan_segments(sm_count, T, H, N, has_offsets);
    if (plan.segments == 1) plan.workspace_bytes = handoff_bytes(sm_count, T, H, N, has_offsets);
    return plan;
}

std::size_t handoff_flags_offset(int sm_count) {
    return static_cast<std::size_t>(sm_count + 1) * kHeadDim * kHeadDim * sizeof(float);
}

}  // namespace flash_kda
