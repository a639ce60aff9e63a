// Rows of tensors that the copy engine cannot take, moved by a warp: any strides and addresses, as long as a row's 128 channels are dense.
#pragma once

#include "kernels/common/ptx.cuh"
#include "kernels/common/slot.h"

namespace flash_kda {

template <class Element>
__device__ __forceinline__ const Element* token_row(const TokenTensor& tensor, int batch, int token, int head) {
    return static_cast<const Element*>(tensor.data) + batch * tensor.strides.batch + token * tensor.strides.token + head * tensor.strides.head;
}

// Four channels a lane, 4*lane onward: of a tile's row, in its two panels.
__device__ __forceinline__ uint32_t channels_at(uint32_t tile, int panel_stride, int row, int lane) {
    return tile + (lane >> 4) * panel_stride + row * 128 + ((((lane & 15) >> 1) ^ (row & 7)) << 4) + (lane & 1) * 8;
}

// Fills a tile of a slot: `valid` rows from `row0`, zeros after them. Nothing beyond these rows is read.
__device__ __forceinline__ void load_rows(uint32_t tile, int panel_stride, const unsigned short* row0, long long stride, int valid, int lane) {
    const bool by_8_bytes = ((reinterpret_cast<uint64_t>(row0) | static_cast<uint64_t>(stride) * 2) & 7) == 0;
    constexpr int kTogether = 8;  // rows in flight
#pragma unroll 1
    for (int first = 0; first < kChunkTokens; first += kTogether) {
        uint2 x[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            const unsigned short* from = row0 + (first + i) * stride + 4 * lane;
            x[i] = {0u, 0u};
            if (first + i >= valid) continue;
            if (by_8_bytes) {
                x[i] = *reinterpret_cast<const uint2*>(from);
            } else {
                x[i].x = from[0] | static_cast<uint32_t>(from[1]) << 16, x[i].y = from[2] | static_cast<uint32_t>(from[3]) << 16;
            }
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) store_u32x2(channels_at(tile, panel_stride, first + i, lane), x[i].x, x[i].y);
    }
}

}  // namespace flash_kda
