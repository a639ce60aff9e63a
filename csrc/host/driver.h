// The CUDA driver, opened at first use. Nothing of CUDA is linked, so the module imports on a machine without a driver.
#pragma once

#include <cuda.h>

#include <string>

namespace flash_kda {

// cuda.h's macros turn some names into their _v2 form; the second column is the symbol that the library exports.
#define FLASH_KDA_DRIVER_CALLS(X)                                                           \
    X(init, cuInit, "cuInit")                                                               \
    X(driver_version, cuDriverGetVersion, "cuDriverGetVersion")                             \
    X(error_name, cuGetErrorName, "cuGetErrorName")                                         \
    X(error_string, cuGetErrorString, "cuGetErrorString")                                   \
    X(device_count, cuDeviceGetCount, "cuDeviceGetCount")                                   \
    X(device_get, cuDeviceGet, "cuDeviceGet")                                               \
    X(device_name, cuDeviceGetName, "cuDeviceGetName")                                      \
    X(device_memory, cuDeviceTotalMem, "cuDeviceTotalMem_v2")                               \
    X(device_attribute, cuDeviceGetAttribute, "cuDeviceGetAttribute")                       \
    X(context_retain, cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain")                 \
    X(context_current, cuCtxGetCurrent, "cuCtxGetCurrent")                                  \
    X(context_push, cuCtxPushCurrent, "cuCtxPushCurrent_v2")                                \
    X(context_pop, cuCtxPopCurrent, "cuCtxPopCurrent_v2")                                   \
    X(capture_mode, cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode") \
    X(module_load, cuModuleLoadData, "cuModuleLoadData")                                    \
    X(module_unload, cuModuleUnload, "cuModuleUnload")                                      \
    X(module_function, cuModuleGetFunction, "cuModuleGetFunction")                          \
    X(function_attribute, cuFuncSetAttribute, "cuFuncSetAttribute")                         \
    X(encode_tensor_map, cuTensorMapEncodeTiled, "cuTensorMapEncodeTiled")                  \
    X(launch, cuLaunchKernelEx, "cuLaunchKernelEx")

struct Driver {
#define FLASH_KDA_DECLARE(member, function, symbol) decltype(&function) member = nullptr;
    FLASH_KDA_DRIVER_CALLS(FLASH_KDA_DECLARE)
#undef FLASH_KDA_DECLARE
    bool loaded = false;
    int version = 0;     // e.g. 13000
    std::string reason;  // why it is not loaded

    // Opens the library once in a process; never throws.
    static const Driver& get();
    // As get(), but throws std::runtime_error with the reason if there is no working driver.
    static const Driver& require();
    // Throws std::runtime_error that names the failed step and the driver's own error text.
    void check(CUresult result, const char* step) const;
};

}  // namespace flash_kda
