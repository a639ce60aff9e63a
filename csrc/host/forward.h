// Plans and launches one forward call. Knows pointers, shapes and strides; the caller has checked them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/params.h"

namespace flash_kda {

struct ForwardCall {
    int B;
    bool whole;                // no sequence may be cut into segments
    std::uintptr_t workspace;  // device pointer, 16-byte aligned
    std::size_t workspace_bytes;
    // The parameters as the kernel takes them; the launch fills in how tensors are moved and what concerns the sharing out of the work.
    ForwardParams params;
};

// Bytes of workspace that such a call needs on a device.
std::size_t forward_workspace(int device, int T, int H, int N, bool has_offsets, bool whole);

// Into how many segments such a call cuts each sequence.
int forward_segments(int device, int T, int H, int N, bool has_offsets, bool whole);

// Launches on `stream` of device `device` and returns at once. Throws std::runtime_error with the driver's error.
void launch_forward(int device, std::uintptr_t stream, ForwardCall call);

}  // namespace flash_kda
