#include "host/driver.h"

#include <dlfcn.h>

#include <stdexcept>

namespace flash_kda {
namespace {

Driver open_driver() {
    Driver driver;
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        driver.reason = "the NVIDIA driver library libcuda.so.1 cannot be opened (no driver on this machine, or a container started without its GPU)";
        return driver;
    }
#define FLASH_KDA_RESOLVE(member, function, symbol)                                                                      \
    driver.member = reinterpret_cast<decltype(driver.member)>(dlsym(library, symbol));                                   \
    if (driver.member == nullptr) {                                                                                      \
        driver.reason = "the NVIDIA driver has no " symbol ": it is too old, CUDA 12.0 (driver 525) or newer is needed"; \
        return driver;                                                                                                   \
    }
    FLASH_KDA_DRIVER_CALLS(FLASH_KDA_RESOLVE)
#undef FLASH_KDA_RESOLVE
    if (CUresult result = driver.init(0); result != CUDA_SUCCESS) {
        const char* text = nullptr;
        driver.error_string(result, &text);
        driver.reason = std::string("cuInit failed: ") + (text != nullptr ? text : "unknown error");
        return driver;
    }
    driver.driver_version(&driver.version);
    driver.loaded = true;
    return driver;
}

}  // namespace

const Driver& Driver::get() {
    static const Driver driver = open_driver();
    return driver;
}

const Driver& Driver::require() {
    const Driver& driver = get();
    if (!driver.loaded) throw std::runtime_error("flash_kda: " + driver.reason);
    return driver;
}

void Driver::check(CUresult result, const char* step) const {
    if (result == CUDA_SUCCESS) return;
    const char *name = nullptr, *text = nullptr;
    error_name(result, &name);
    error_string(result, &text);
    throw std::runtime_error(std::string("flash_kda: ") + step + " failed: " + (name != nullptr ? name : "unknown CUDA error") + " (" +
                             (text != nullptr ? text : "no description") + ")");
}

}  // namespace flash_kda
