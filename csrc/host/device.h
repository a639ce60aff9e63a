// Devices: what they are, their primary context, and the kernel that serves them.
#pragma once

#include <string>

#include "host/driver.h"
#include "host/embedded.h"

namespace flash_kda {

struct DeviceInfo {
    std::string name;
    int major = 0, minor = 0;
    int sm_count = 0;
    std::size_t total_memory = 0;            // bytes
    int shared_memory_per_block_optin = 0;   // bytes
};

// 0 if there is no working driver.
int device_count();
DeviceInfo device_info(int index);
// The embedded cubin for this device. Throws std::runtime_error that lists what is embedded if none fits.
const EmbeddedCubin& select_cubin(int index);

// A kernel: an entry point and what its launch needs.
struct KernelShape {
    const char* name = nullptr;  // what the environment variable FLASH_KDA_KERNEL calls it
    const char* entry = nullptr;
    int threads = 0;       // in a block
    int shared_bytes = 0;  // dynamic, in a block
};
// The first kernel that fits a device, or the one that FLASH_KDA_KERNEL names. Throws std::runtime_error if that one is unknown or does not fit.
const KernelShape& select_kernel(const DeviceInfo& info);

// A device's kernel, loaded once into its primary context. Safe to call from any thread and during stream capture.
struct LoadedKernel {
    CUcontext context = nullptr;
    CUfunction function = nullptr;
    KernelShape shape;
};
const LoadedKernel& loaded_kernel(int index);

// Makes a context current for a scope. Threads that never touched CUDA (bare threads, autograd's) have none.
class ContextScope {
   public:
    explicit ContextScope(CUcontext context);
    ~ContextScope();
    ContextScope(const ContextScope&) = delete;
    ContextScope& operator=(const ContextScope&) = delete;

   private:
    bool pushed_ = false;
};

}  // namespace flash_kda
