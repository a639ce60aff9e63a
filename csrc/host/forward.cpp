#include "host/forward.h"

#include <algorithm>
#include <atomic>
#include <random>
#include <stdexcept>
#include <string>

#include "host/device.h"
#include "host/driver.h"
#include "host/plan.h"
#include "kernels/common/combine.h"
#include "kernels/common/slot.h"

namespace flash_kda {
namespace {

using slot::kPanelChannels;
constexpr int kPanels = kHeadDim / kPanelChannels;
constexpr int kElementBytes = 2;
constexpr int kOverlapVersion = 12030;  // of the driver: kernels that overlap can be captured in graphs

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
    params.load_bytes = 0;
    if (B == 0 || params.T == 0) return maps;  // the copy engine knows no empty tensor; without tokens nothing is moved
    const auto describe = [&](CUtensorMap& map, int which, const TokenTensor& tensor, int heads, int panels) {
        const bool fp32 = which == by_hand::kGate && params.g_is_fp32;
        if (!fp32 && copyable(tensor, B, params.T, heads)) {
            map = encode(driver, tensor, B, params.T, heads, panels);
            if (which != by_hand::kOut) params.load_bytes += kPanels * slot::kPanelBytes;
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

// Never the same twice in a process, and hardly what fresh memory happens to hold.
unsigned long long next_ticket() {
    static std::atomic<unsigned long long> ticket{static_cast<unsigned long long>(std::random_device{}()) * 0x9e3779b97f4a7c15ull};
    return ++ticket;
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
    CUlaunchConfig config = {};
    config.hStream = reinterpret_cast<CUstream>(stream);
    // A kernel may come to the multiprocessors before the one before it has left all of them; it waits there (ptx.cuh).
    CUlaunchAttribute overlap = {};
    overlap.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    overlap.value.programmaticStreamSerializationAllowed = 1;
    config.attrs = &overlap;
    const auto start = [&](CUfunction kernel, unsigned x, unsigned y, unsigned z, int threads, int shared_bytes, void** arguments) {
        config.gridDimX = x, config.gridDimY = y, config.gridDimZ = z;
        config.blockDimX = threads, config.blockDimY = config.blockDimZ = 1;
        config.sharedMemBytes = shared_bytes;
        driver.check(driver.launch(&config, kernel, arguments, nullptr), "launching a kernel");
        if (driver.version >= kOverlapVersion) config.numAttrs = 1;  // of the next one
    };
    const auto launch = [&](Pass pass, long long blocks) {
        params.pass = pass;
        void* arguments[] = {&params, const_cast<Maps*>(&maps)};
        start(params.general ? loaded.general : loaded.function, static_cast<unsigned>(std::min<long long>(blocks, loaded.sm_count)), 1, 1,
              loaded.kernel->threads, loaded.kernel->shared_bytes, arguments);
    };

    const Plan plan = plan_call(loaded.sm_count, params.T, params.H, params.N, params.cu_seqlens != nullptr, call.whole);
    const std::size_t needed = plan.workspace_bytes;
    if (needed > 0 && (call.workspace == 0 || call.workspace_bytes < needed)) {
        throw std::runtime_error("flash_kda: this call needs " + std::to_string(needed) + " bytes of workspace, got " +
                                 std::to_string(call.workspace == 0 ? 0 : call.workspace_bytes));
    }
    if (plan.segments == 1) {
        if (needed > 0) {
            params.handoff_states = reinterpret_cast<float*>(call.workspace);
            params.handoff_flags = reinterpret_cast<unsigned long long*>(call.workspace + handoff_flags_offset(loaded.sm_count));
            params.handoff_ticket = next_ticket();
            params.may_forget = plan.may_forget;
        }
        launch(Pass::kWhole, plan.may_forget ? loaded.sm_count : items);
        return;
    }
    const auto at = [&](std::size_t offset) { return reinterpret_cast<void*>(call.workspace + offset); };
    params.boundary_states = static_cast<float*>(at(0));
    params.transitions = static_cast<float*>(at(transitions_offset(plan, params.H, params.N)));
    params.trial_states = static_cast<float*>(at(trial_states_offset(plan, params.H, params.N)));
    params.forgotten = static_cast<unsigned long long*>(at(trial_flags_offset(plan, params.H, params.N)));
    params.trial_segments = params.segments = plan.trial_segments;
    params.segment_tokens = plan.trial_tokens;
    launch(Pass::kTrial, items * plan.trial_segments);
    params.segments = plan.segments;
    params.segment_tokens = plan.segment_tokens;
    launch(Pass::kSummaries, items * (2 * plan.segments - 3));
    void* arguments[] = {&params};
    start(loaded.combine, kCombineBlocks, static_cast<unsigned>(params.H), static_cast<unsigned>(params.N), kCombineThreads, 0, arguments);
    launch(Pass::kSegments, items * plan.segments);
}

}  // namespace flash_kda
