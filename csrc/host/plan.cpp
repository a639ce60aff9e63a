#include "host/plan.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels/common/ring.h"
#include "kernels/common/schedule.h"
#include "kernels/common/segments.h"

namespace flash_kda {
namespace {

// Of a sequence, and of a segment.
constexpr int kLeastSplitTokens = 1024, kLeastSegmentTokens = 128;
// In chunks: what segments cost besides scans, and what one without outputs costs.
constexpr double kSplitCost = 20, kStateCost = .8;
constexpr std::size_t kStateBytes = std::size_t{kHeadDim} * kHeadDim * sizeof(float);

bool may_split() {
    const char* setting = std::getenv("FLASH_KDA_SPLIT");
    if (setting == nullptr || *setting == 0 || std::strcmp(setting, "auto") == 0) return true;
    if (std::strcmp(setting, "0") == 0) return false;
    throw std::runtime_error(std::string("flash_kda: FLASH_KDA_SPLIT=") + setting + " is unknown; expected auto or 0");
}

Plan plan_segments(int sm_count, int T, int H, int N, bool has_offsets) {
    Plan plan;
    const long long items = static_cast<long long>(N) * H;
    if (items <= 0 || 2 * items > sm_count || T < kLeastSplitTokens || (has_offsets && N > 1)) return {};
    const long long wanted = std::min<long long>(sm_count / items, T / kLeastSegmentTokens);
    const int chunks = (T - 1) / kChunkTokens + 1, each = static_cast<int>((chunks + wanted - 1) / wanted);
    plan.segment_tokens = each * kChunkTokens;
    plan.segments = (chunks + each - 1) / each;
    const int stretch = stretch_tokens(plan.segments, plan.segment_tokens) / kChunkTokens;
    if (kSplitCost + kStateCost * stretch + each > chunks) return {};
    plan.workspace_bytes = segment_parts(static_cast<int>(items) * plan.segments).end;
    return plan;
}

// If items may be cut: room for the states that change hands.
std::size_t handoff_bytes(int blocks, int T, int H, int N, bool has_offsets, bool may_forget) {
    const long long items = static_cast<long long>(N) * H;
    const long long chunks = (T + kChunkTokens - 1) / kChunkTokens;
    const long long most = (has_offsets ? chunks + N : chunks * N) + static_cast<long long>(N) * kItemCost;  // of one head, with what items cost
    // The device rounds a share up before it compares: hence one less.
    if ((items <= blocks && !may_forget) || most * H < static_cast<long long>(blocks) * (kLeastShare - 1)) return 0;
    return handoff_flags_offset(blocks) + static_cast<std::size_t>(blocks + 1) * kScanWarps * sizeof(unsigned long long);
}

}  // namespace

Plan plan_call(int sm_count, int T, int H, int N, bool has_offsets, bool whole) {
    const bool split = !whole && may_split();
    Plan plan = split ? plan_segments(sm_count, T, H, N, has_offsets) : Plan{};
    if (plan.segments == 1) {
        plan.workspace_bytes = handoff_bytes(sm_count, T, H, N, has_offsets, split);
        plan.may_forget = split && plan.workspace_bytes > 0;
    }
    return plan;
}

std::size_t handoff_flags_offset(int sm_count) {
    return (sm_count + 1) * kStateBytes;
}

SegmentParts segment_parts(int blocks) {
    const std::size_t states = blocks * kStateBytes;
    const std::size_t signals = 4 * states + static_cast<std::size_t>(blocks) * kExchangeBytes;
    return {states, 2 * states, 3 * states, 4 * states, signals, signals + blocks * kSignals * sizeof(unsigned long long)};
}

}  // namespace flash_kda
