// The device code that this module carries. The build generates the definitions (tools/), from the cubins it compiled.
#pragma once

#include <cstddef>

namespace flash_kda {

struct EmbeddedCubin {
    const char* unit;  // kernel source it was compiled from, e.g. "portable"
    const char* arch;  // target, e.g. "90a"
    int major;         // compute capability it runs on: major.minor_first .. major.minor_last
    int minor_first;
    int minor_last;
    const char* sha256;  // of the bytes [begin, end)
    const unsigned char* begin;
    const unsigned char* end;
};

// Most specific first: of two cubins of one unit that fit a device, the earlier one is to be used.
extern const EmbeddedCubin kEmbeddedCubins[];
extern const std::size_t kEmbeddedCubinCount;
// JSON: version, lock digest, toolchain, setting, and each cubin's digest and resources.
extern const char kBuildRecord[];

}  // namespace flash_kda
