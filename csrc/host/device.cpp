#include "host/device.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>

#include "kernels/portable/config.h"
#include "kernels/sm90/config.h"

namespace flash_kda {
namespace {

std::string no_such_device(int index, int count) {
    return "flash_kda: CUDA device " + std::to_string(index) + " does not exist: " + std::to_string(count) + " visible";
}

CUdevice device_handle(const Driver& driver, int index) {
    const int count = device_count();
    if (index < 0 || index >= count) {
        throw std::runtime_error(no_such_device(index, count));
    }
    CUdevice device;
    driver.check(driver.device_get(&device, index), "finding the CUDA device");
    return device;
}

int attribute(const Driver& driver, CUdevice device, CUdevice_attribute which) {
    int value = 0;
    driver.check(driver.device_attribute(&value, which, device), "reading a device attribute");
    return value;
}

// Loading a module is refused while a stream of this thread is being captured, unless the thread asks for the relaxed mode. The load itself
// is no part of the captured work.
class RelaxedCapture {
   public:
    explicit RelaxedCapture(const Driver& driver) : driver_(driver) { driver_.check(driver_.capture_mode(&mode_), "relaxing the capture mode"); }
    ~RelaxedCapture() { driver_.capture_mode(&mode_); }
    RelaxedCapture(const RelaxedCapture&) = delete;
    RelaxedCapture& operator=(const RelaxedCapture&) = delete;

   private:
    const Driver& driver_;
    CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

// Best first. The entry points are named in the units' sources.
#define FLASH_KDA_ENTRIES(name) \
    "flash_kda_forward_" name, "flash_kda_forward_" name "_general", "flash_kda_segments_" name, "flash_kda_segments_" name "_general"
constexpr Kernel kKernels[] = {
    {"sm90", "sm90", FLASH_KDA_ENTRIES("sm90"), sm90::Usual::kThreads, sm90::Usual::kDynamicSharedBytes},
    {"portable-wide", "portable", FLASH_KDA_ENTRIES("portable_wide"), portable::Wide::kThreads, portable::Wide::kDynamicSharedBytes},
    {"portable-narrow", "portable", FLASH_KDA_ENTRIES("portable_narrow"), portable::Narrow::kThreads, portable::Narrow::kDynamicSharedBytes},
};
#undef FLASH_KDA_ENTRIES

const EmbeddedCubin* find_cubin(const char* unit, const DeviceInfo& info) {
    for (std::size_t i = 0; i < kEmbeddedCubinCount; ++i) {
        const EmbeddedCubin& cubin = kEmbeddedCubins[i];
        if (std::strcmp(cubin.unit, unit) == 0 && info.major == cubin.major && info.minor >= cubin.minor_first && info.minor <= cubin.minor_last) {
            return &cubin;
        }
    }
    return nullptr;
}

std::string embedded_list() {
    std::string list;
    for (std::size_t i = 0; i < kEmbeddedCubinCount; ++i) {
        list += std::string(i > 0 ? ", " : "") + kEmbeddedCubins[i].unit + " for sm_" + kEmbeddedCubins[i].arch;
    }
    return list.empty() ? "nothing" : list;
}

std::string describe_device(const DeviceInfo& info) {
    return info.name + " (compute capability " + std::to_string(info.major) + "." + std::to_string(info.minor) + ", " +
           std::to_string(info.shared_memory_per_block_optin) + " bytes of shared memory a block)";
}

LoadedKernel load_kernel(int index) {
    const Driver& driver = Driver::require();
    const DeviceInfo info = device_info(index);
    const Choice choice = choose_kernel(info);
    LoadedKernel loaded;
    loaded.kernel = choice.kernel;
    loaded.sm_count = info.sm_count;
    RelaxedCapture relaxed(driver);
    driver.check(driver.context_retain(&loaded.context, device_handle(driver, index)), "retaining the device's primary context");
    ContextScope scope(loaded.context);
    CUmodule module;
    driver.check(driver.module_load(&module, choice.cubin->begin), "loading the embedded kernel");
    try {
        const auto find = [&](CUfunction& function, const char* entry) {
            driver.check(driver.module_function(&function, module, entry), "finding the kernel's entry point");
            driver.check(driver.function_attribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, choice.kernel->shared_bytes),
                         "raising the kernel's shared-memory limit");
        };
        find(loaded.forward.usual, choice.kernel->forward_entry);
        find(loaded.forward.general, choice.kernel->general_forward_entry);
        find(loaded.segments.usual, choice.kernel->segments_entry);
        find(loaded.segments.general, choice.kernel->general_segments_entry);
    } catch (...) {
        driver.module_unload(module);
        throw;
    }
    return loaded;
}

struct DeviceSlot {
    std::atomic<bool> ready{false};
    std::mutex mutex;
    LoadedKernel loaded;
};

}  // namespace

int device_count() {
    const Driver& driver = Driver::get();
    int count = 0;
    if (!driver.loaded || driver.device_count(&count) != CUDA_SUCCESS) return 0;
    return count;
}

DeviceInfo device_info(int index) {
    const Driver& driver = Driver::require();
    const CUdevice device = device_handle(driver, index);
    DeviceInfo info;
    char name[256] = {};
    driver.check(driver.device_name(name, sizeof(name) - 1, device), "reading the device's name");
    info.name = name;
    info.major = attribute(driver, device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
    info.minor = attribute(driver, device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
    info.sm_count = attribute(driver, device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    info.shared_memory_per_block_optin = attribute(driver, device, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
    driver.check(driver.device_memory(&info.total_memory, device), "reading the device's memory size");
    return info;
}

Choice choose_kernel(const DeviceInfo& info) {
    const char* forced = std::getenv("FLASH_KDA_KERNEL");
    const bool automatic = forced == nullptr || *forced == 0 || std::strcmp(forced, "auto") == 0;
    std::string known = "auto";
    for (const Kernel& kernel : kKernels) {
        known += std::string(", ") + kernel.name;
        if (!automatic && std::strcmp(forced, kernel.name) != 0) continue;
        const EmbeddedCubin* cubin = find_cubin(kernel.unit, info);
        if (cubin != nullptr && info.shared_memory_per_block_optin >= kernel.shared_bytes) return {&kernel, cubin};
        if (automatic) continue;
        throw std::runtime_error(std::string("flash_kda: FLASH_KDA_KERNEL=") + forced + " cannot run on " + describe_device(info) + ": " +
                                 (cubin == nullptr ? "this build holds " + embedded_list()
                                                   : "it needs " + std::to_string(kernel.shared_bytes) + " bytes of shared memory a block"));
    }
    if (!automatic) throw std::runtime_error(std::string("flash_kda: FLASH_KDA_KERNEL=") + forced + " is unknown; expected one of " + known);
    throw std::runtime_error("flash_kda: no kernel for " + describe_device(info) + "; this build holds " + embedded_list() +
                             ". Rebuild with FLASH_KDA_CUDA_ARCHS set for this GPU, if it is one of the supported ones");
}

const LoadedKernel& loaded_kernel(int index) {
    // One slot a device, made before any thread can ask for it; a failed load throws and is tried again at the next call.
    static const int count = device_count();
    static const std::unique_ptr<DeviceSlot[]> slots(new DeviceSlot[count > 0 ? count : 1]);
    if (index < 0 || index >= count) {
        Driver::require();
        throw std::runtime_error(no_such_device(index, count));
    }
    DeviceSlot& slot = slots[index];
    if (!slot.ready.load(std::memory_order_acquire)) {
        const std::lock_guard<std::mutex> lock(slot.mutex);
        if (!slot.ready.load(std::memory_order_relaxed)) {
            slot.loaded = load_kernel(index);
            slot.ready.store(true, std::memory_order_release);
        }
    }
    return slot.loaded;
}

ContextScope::ContextScope(CUcontext context) {
    const Driver& driver = Driver::require();
    CUcontext current = nullptr;
    driver.check(driver.context_current(&current), "reading the current context");
    if (current == context) return;
    driver.check(driver.context_push(context), "making the device's context current");
    pushed_ = true;
}

ContextScope::~ContextScope() {
    if (!pushed_) return;
    CUcontext ignored;
    Driver::get().context_pop(&ignored);
}

}  // namespace flash_kda
