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

// Shorter sequences, and segments, do not pay for three more launches and for filling the ring twice.
constexpr int kLeastSplitTokens = 1024;
constexpr int kLeastSegmentTokens = 256;
// Segments on trial: the windows before one are as long as it.
constexpr int kLeastTrialTokens = 128;
constexpr std::size_t kStateBytes = std::size_t{kHeadDim} * kHeadDim * sizeof(float);

bool may_split() {
    const char* setting = std::getenv("FLASH_KDA_SPLIT");
    if (setting == nullptr || *setting == 0 || std::strcmp(setting, "auto") == 0) return true;
    if (std::strcmp(setting, "0") == 0) return false;
    throw std::runtime_error(std::string("flash_kda: FLASH_KDA_SPLIT=") + setting + " is unknown; expected auto or 0");
}

// Cuts T tokens into at most so many segments; how many there are then, and of how many tokens.
void cut(int T, long long wanted, int& segments, int& tokens) {
    const long long each = ((T + wanted - 1) / wanted + kChunkTokens - 1) / kChunkTokens * kChunkTokens;
    tokens = static_cast<int>(each);
    segments = static_cast<int>((T + each - 1) / each);
}

Plan plan_segments(int sm_count, int T, int H, int N, bool has_offsets) {
    Plan plan;
    const long long items = static_cast<long long>(N) * H;
    if (items <= 0 || 3 * items > sm_count || T < kLeastSplitTokens || (has_offsets && N > 1)) return plan;
    // The first of two passes has 2 * segments - 3 items for each sequence and head: as many segments as still run at once.
    const long long wanted = std::min<long long>((sm_count + 3 * items) / (2 * items), T / kLeastSegmentTokens);
    if (wanted < 3) return plan;  // with two, both passes together take as long as one
    cut(T, wanted, plan.segments, plan.segment_tokens);
    cut(T, std::min<long long>(sm_count / items, T / kLeastTrialTokens), plan.trial_segments, plan.trial_tokens);
    plan.workspace_bytes = trial_flags_offset(plan, H, N) + static_cast<std::size_t>(items) * plan.trial_segments * sizeof(unsigned long long);
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

std::size_t transitions_offset(const Plan& plan, int H, int N) {
    return kStateBytes * N * plan.segments * H;
}

std::size_t trial_states_offset(const Plan& plan, int H, int N) {
    return 2 * transitions_offset(plan, H, N);
}

std::size_t trial_flags_offset(const Plan& plan, int H, int N) {
    return trial_states_offset(plan, H, N) + kStateBytes * N * H;
}

}  // namespace flash_kda
