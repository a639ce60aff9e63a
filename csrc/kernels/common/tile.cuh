// How a warp addresses the swizzled tiles of a slot.
#pragma once

#include "kernels/common/ptx.cuh"
#include "kernels/common/slot.h"

namespace flash_kda {

// This lane's row of the four 8x8 matrices that cover 16 rows x 16 columns of a swizzled panel, in the order (rows 0-7, columns 0-7),
// (rows 8-15, columns 0-7), (rows 0-7, columns 8-15), (rows 8-15, columns 8-15).
__device__ __forceinline__ uint32_t fragment_offset(int lane) {
    const uint32_t row = (lane & 7) + ((lane >> 3) & 1) * 8;
    return row * 128 + (((lane >> 4) ^ (row & 7)) << 4);
}

// The same for 16-channel block i of the eight of a tile that lies at `tile` of the slot.
__device__ __forceinline__ uint32_t block_address(uint32_t slot, uint32_t offset, int i, int tile, int panel_stride) {
    return slot + (offset ^ ((i & 3) << 5)) + tile + (i >> 2) * panel_stride;
}

// The same for unrolled loops: an address for each of a panel's four blocks, from which tiles and panels are constant distances that the
// instruction takes as an immediate. The compiler must not fold the distances back into the offsets, or it runs out of registers.
struct BlockAddresses {
    uint32_t block[4];

    __device__ __forceinline__ BlockAddresses(uint32_t slot, uint32_t offset) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            block[i] = slot + (offset ^ (i << 5));
            asm("" : "+r"(block[i]));
        }
    }
    __device__ __forceinline__ uint32_t key(int i) const { return block[i & 3] + slot::kKey + (i >> 2) * slot::kKeyQueryPanelStride; }
    __device__ __forceinline__ uint32_t query(int i) const { return block[i & 3] + slot::kQuery + (i >> 2) * slot::kKeyQueryPanelStride; }
    __device__ __forceinline__ uint32_t key_minus(int i) const { return block[i & 3] + slot::kKeyMinus + (i >> 2) * slot::kPanelStride; }
};

}  // namespace flash_kda
