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
    std::size_t total_memory = 0;           // bytes
    int shared_memory_per_block_optin = 0;  // bytes
};

// 0 if there is no working driver.
int device_count();
DeviceInfo device_info(int index);

// A kernel: entry points of a unit's cubin, and what their launch needs. A general entry is for calls that the usual one does not take
// (ForwardParams::general).
struct Kernel {
    const char* name;  // what the environment variable FLASH_KDA_KERNEL calls it
    const char* unit;
    const char *forward_entry, *general_forward_entry;
    const char *segments_entry, *general_segments_entry;
    int threads;       // in a block
    int shared_bytes;  // dynamic, in a block
};

struct Choice {
    const Kernel* kernel;
    const EmbeddedCubin* cubin;
};

// The best kernel that is embedded for a device and fits it, or the one that FLASH_KDA_KERNEL names. Throws std::runtime_error with the
// reason if there is none.
Choice choose_kernel(const DeviceInfo& info);

struct Entries {
    CUfunction usual = nullptr, general = nullptr;
};

// A device's kernel, loaded once into its primary context. Safe to call from any thread and during stream capture.
struct LoadedKernel {
    const Kernel* kernel = nullptr;
    CUcontext context = nullptr;
    Entries forward;
    Entries segments;  // for calls that are cut into them: all blocks must be resident together
    int sm_count = 0;
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
