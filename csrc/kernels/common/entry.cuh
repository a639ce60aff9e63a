// Entry points, by the names under which the host looks them up.
#pragma once

#include "kernels/common/pipeline.cuh"

// One block a multiprocessor, so that each thread may have all its registers.
#define FLASH_KDA_ENTRY(name, space, Config)                                                                     \
    extern "C" __global__ void __launch_bounds__(flash_kda::space::Config::kThreads, 1)                          \
        name(const __grid_constant__ flash_kda::ForwardParams p, const __grid_constant__ flash_kda::Maps maps) { \
        flash_kda::space::forward<flash_kda::space::Config>(p, maps);                                            \
    }
