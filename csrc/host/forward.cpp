#include "host/forward.h"

#include <algorithm>
#include <atomic>
#include <random>
#include <stdexcept>
#include <string>

#include "host/device.h"
#include "host/driver.h"
#include "host/plan.h"
#include "kernels/common/segments.h"
#include "kernels/common/slot.h"

namespace flash_kda {
namespace {

using slot::kPanelChannels;
constexpr int kPanels = kHeadDim / kPanelChannels;
constexpr int kElementBytes = 2;

// Whether the copy engine can take a bf16 tensor: 16-byte aligned, strides that are multiples of 16 bytes and below 2^40.
bool copyable(const TokenTensor& tensor, int B, int T, int heads) {
    const auto fits = [](long long stride, int extent) {
        return extent <= 1 || (stride % (16 / kElementBytes) == 0 && stride < (1ll << 40) / kElementBytes);
    };
    return reinterpret_cast<std::uintptr_t>(tensor.data) % 16 == 0 && fits(tensor.strides.batch, B) && fits(tensor.strides.token, T) &&
           fits(tensor.strides.head, heads);
}

// [B, T, heads, 128] seen as (channel in panel, token, panel, head, batch row); one copy brings `panels` panels of 16 tokens.
CUtensorMap encode(const Driver& driver, const TokenTensor& tensor, int B, int T, int heads, int panels) {
    const auto bytes = [](long long stride, int extent) {
        // The stride of an extent of one is never used, and may be anything.
        return static_cast<cuuint64_t>(extent > 1 ? stride * kElementBytes : kHeadDim * kElementBytes);
    };
    const cuuint64_t extents[5] = {kPanelChannels, static_cast<cuuint64_t>(T), kPanels, static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(B)};
    const cuuint64_t strides[4] = {bytes(tensor.strides.token, T), kPanelChannels * kElementBytes, bytes(tensor.strides.head, heads),
                                   bytes(tensor.strides.batch, B)};
    const cuuint32_t box[5] = {kPanelChannels, kChunkTokens, static_cast<cuuint32_t>(panels), 1, 1};
    const cuuint32_t element_strides[5] = {1, 1, 1, 1, 1};
    CUtensorMap map;
    driver.check(driver.encode_tensor_map(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5, const_cast<void*>(tensor.data), extents, strides, box,
                                          element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                          CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
                 "describing a tensor to the copy engine");
    return map;
}

// As the kernels declare it.
struct Maps {
    CUtensorMap q, k, v, g, o;
};
static_assert(sizeof(Maps) == 5 * 128 && alignof(Maps) == 64);

// Describes to the copy engine what it can take, and leaves the rest to warps.
Maps describe_tensors(const Driver& driver, ForwardParams& params, int B) {
    Maps maps = {};
    params.by_hand = 0;
    if (B == 0 || params.T == 0) return maps;  // the copy engine knows no empty tensor; without tokens nothing is moved
    const auto describe = [&](CUtensorMap& map, int which, const TokenTensor& tensor, int heads, int panels) {
        const bool fp32 = which == by_hand::kGate && params.g_is_fp32;
        if (!fp32 && copyable(tensor, B, params.T, heads)) {
            map = encode(driver, tensor, B, params.T, heads, panels);
        } else {
            params.by_hand |= which;
        }
    };
    describe(maps.q, by_hand::kQuery, params.q, params.H / params.group, 1);
    describe(maps.k, by_hand::kKey, params.k, params.H / params.group, 1);
    describe(maps.v, by_hand::kValue, params.v, params.H, kPanels);
    describe(maps.g, by_hand::kGate, params.g, params.H, kPanels);
    describe(maps.o, by_hand::kOut, params.out, params.H, kPanels);
    return maps;
}

// Never the same twice in a process, and hardly what fresh memory happens to hold. Below 2^63.
unsigned long long next_ticket() {
    static std::atomic<unsigned long long> ticket{static_cast<unsigned long long>(std::random_device{}()) * 0x9e3779b97f4a7c15ull};
    return ++ticket & ~(1ull << 63);
}

}  // namespace

int forward_segments(int device, int T, int H, int N, bool has_offsets, bool whole) {
    return plan_call(loaded_kernel(device).sm_count, T, H, N, has_offsets, whole).segments;
}

std::size_t forward_workspace(int device, int T, int H, int N, bool has_offsets, bool whole) {
    return plan_call(loaded_kernel(device).sm_count, T, H, N, has_offsets, whole).workspace_bytes;
}

void launch_forward(int device, std::uintptr_t stream, ForwardCall call) {
    ForwardParams& params = call.params;
    const long long items = static_cast<long long>(params.N) * params.H;
    if (items == 0) return;
    constexpr long long kMostItems = 1 << 30;  // they are counted in int, a round of the grid ahead
    if (items > kMostItems) {
        throw std::runtime_error("flash_kda: N * H = " + std::to_string(items) + ", more than " + std::to_string(kMostItems) + " in one call");
    }
    const LoadedKernel& loaded = loaded_kernel(device);
    const Driver& driver = Driver::require();
    ContextScope scope(loaded.context);
    params.usual = params.gate == Gate::kBounded && !params.g_is_fp32 && params.normalise;
    const Maps maps = describe_tensors(driver, params, call.B);
    params.general = !params.usual || params.by_hand != 0 || params.saves;
    // Whether there was room for all blocks at once, if that is what it takes.
    const auto launch = [&](const Entries& entries, int blocks, bool together) {
        CUlaunchConfig config = {};
        config.gridDimX = blocks, config.gridDimY = config.gridDimZ = 1;
        config.blockDimX = loaded.kernel->threads, config.blockDimY = config.blockDimZ = 1;
        config.sharedMemBytes = loaded.kernel->shared_bytes;
        config.hStream = reinterpret_cast<CUstream>(stream);
        CUlaunchAttribute cooperative = {};
        cooperative.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
        cooperative.value.cooperative = 1;
        config.attrs = &cooperative;
        config.numAttrs = together ? 1 : 0;
        void* arguments[] = {&params, const_cast<Maps*>(&maps)};
        const CUresult result = driver.launch(&config, params.general ? entries.general : entries.usual, arguments, nullptr);
        if (together && result == CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE) return false;
        driver.check(result, "launching a kernel");
        return true;
    };

    const Plan plan = plan_call(loaded.sm_count, params.T, params.H, params.N, params.cu_seqlens != nullptr, call.whole);
    const std::size_t needed = plan.workspace_bytes;
    if (needed > 0 && (call.workspace == 0 || call.workspace_bytes < needed)) {
        throw std::runtime_error("flash_kda: this call needs " + std::to_string(needed) + " bytes of workspace, got " +
                                 std::to_string(call.workspace == 0 ? 0 : call.workspace_bytes));
    }
    const auto states_at = [&](std::size_t offset) { return reinterpret_cast<float*>(call.workspace + offset); };
    const auto flags_at = [&](std::size_t offset) { return reinterpret_cast<unsigned long long*>(call.workspace + offset); };
    params.ticket = next_ticket();
    if (plan.segments > 1) {
        const int blocks = static_cast<int>(items) * plan.segments;
        const SegmentParts parts = segment_parts(blocks);
        params.segment_states = states_at(0);
        params.segment_transitions = states_at(parts.segment_transitions);
        params.stretch_states = states_at(parts.stretch_states);
        params.stretch_transitions = states_at(parts.stretch_transitions);
        params.exchange = states_at(parts.exchange);
        params.signals = flags_at(parts.signals);
        params.segments = plan.segments, params.segment_tokens = plan.segment_tokens;
        params.stretch_tokens = stretch_tokens(plan.segments, plan.segment_tokens);
        // Where only part of the GPU is to be had (green contexts, MPS) the blocks may not be resident together: then as if nothing could be cut.
        if (launch(loaded.segments, blocks, true)) return;
    } else if (needed > 0) {
        params.handoff_states = states_at(0);
        params.handoff_flags = flags_at(handoff_flags_offset(loaded.sm_count));
        params.may_forget = plan.may_forget;
    }
    launch(loaded.forward, static_cast<int>(plan.may_forget ? loaded.sm_count : std::min<long long>(items, loaded.sm_count)), false);
}

}  // namespace flash_kda
