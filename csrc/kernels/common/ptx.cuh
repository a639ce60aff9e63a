// Thin names over instructions, for fragments held in arrays; CuTe's atoms where they fit. Shared-memory operands are byte addresses in the
// shared window, not pointers: the compiler turns every generic pointer back into one at a cost.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm80.hpp>

#include "kernels/common/params.h"
#include "kernels/common/ring.h"

namespace flash_kda {

// A CUtensorMap as the kernel sees it: 128 opaque bytes, written by the host.
struct alignas(64) TensorMap {
    unsigned char opaque[128];
};

__device__ __forceinline__ char* shared_pointer(uint32_t address) {
    return static_cast<char*>(__cvta_shared_to_generic(address));
}

// mbarriers, by address.
__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t phase) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "AGAIN:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra AGAIN;\n"
        "}"
        :
        : "r"(barrier), "r"(phase)
        : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_expect_bytes(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(barrier), "r"(bytes) : "memory");
}

// Flags in global memory: what the lanes of a warp wrote before they `publish` is there for whoever observes the flag. A predicate, not a branch: behind a
// branch the compiler no longer believes that the warp stays together, and moves addresses out of uniform registers.
__device__ __forceinline__ void publish(unsigned long long* flag, unsigned long long value, bool elected) {
    asm volatile(
        "{\n"
        ".reg .pred elected;\n"
        "setp.ne.b32 elected, %2, 0;\n"
        "fence.acq_rel.gpu;\n"
        "bar.warp.sync 0xffffffff;\n"
        "fence.acq_rel.gpu;\n"
        "@elected st.relaxed.gpu.b64 [%0], %1;\n"
        "}"
        :
        : "l"(flag), "l"(value), "r"(static_cast<int>(elected))
        : "memory");
}

__device__ __forceinline__ unsigned long long observe(const unsigned long long* flag) {
    unsigned long long value;
    asm volatile("ld.acquire.gpu.b64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
    return value;
}

// A flag for a later kernel, or one that nothing hangs on: a predicate for the same reason.
__device__ __forceinline__ void store_elected(unsigned long long* to, unsigned long long value, bool elected) {
    asm volatile(
        "{\n"
        ".reg .pred elected;\n"
        "setp.ne.b32 elected, %2, 0;\n"
        "@elected st.relaxed.gpu.b64 [%0], %1;\n"
        "}"
        :
        : "l"(to), "l"(value), "r"(static_cast<int>(elected))
        : "memory");
}

// This lane, read anew: where a register to hold it is one too many.
__device__ __forceinline__ int fresh_lane() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// The value of lane 0, which the compiler then knows to be the same in the whole warp.
__device__ __forceinline__ int uniform(int x) {
    return __shfl_sync(~0u, x, 0);
}

// Whether it is so in some lane of the scan warps, which all come here.
__device__ __forceinline__ bool any_scan_warp(bool here) {
    int any;
    asm volatile(
        "{\n"
        ".reg .pred here, any;\n"
        "setp.ne.b32 here, %1, 0;\n"
        "barrier.cta.red.or.pred any, 1, %2, here;\n"
        "selp.b32 %0, 1, 0, any;\n"
        "}"
        : "=r"(any)
        : "r"(static_cast<int>(here)), "n"(kScanWarps * 32)
        : "memory");
    return uniform(any) != 0;
}

// Four 8x8 b16 matrices; lane l gives the address of row l%8 of matrix l/8.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void store_matrices(uint32_t address, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

__device__ __forceinline__ void store_matrices_transposed(uint32_t address, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

__device__ __forceinline__ float load_float(uint32_t address) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
    return x;
}

__device__ __forceinline__ uint32_t load_u32(uint32_t address) {
    uint32_t x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
}

__device__ __forceinline__ float2 load_float2(uint32_t address) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
    return x;
}

__device__ __forceinline__ float4 load_float4(uint32_t address) {
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(address) : "memory");
    return x;
}

__device__ __forceinline__ void store_float(uint32_t address, float x) {
    asm volatile("st.shared.f32 [%0], %1;" : : "r"(address), "f"(x) : "memory");
}

__device__ __forceinline__ void store_float2(uint32_t address, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" : : "r"(address), "f"(x), "f"(y) : "memory");
}

__device__ __forceinline__ void store_float4(uint32_t address, float x, float y, float z, float w) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" : : "r"(address), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}

__device__ __forceinline__ void store_u32(uint32_t address, uint32_t x) {
    asm volatile("st.shared.b32 [%0], %1;" : : "r"(address), "r"(x) : "memory");
}

__device__ __forceinline__ void store_u32x2(uint32_t address, uint32_t x, uint32_t y) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" : : "r"(address), "r"(x), "r"(y) : "memory");
}

__device__ __forceinline__ void store_u32x4(uint32_t address, const uint32_t* x) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" : : "r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}

// d[16x8] += a[16x16] b[16x8], bf16 in, fp32 accumulate.
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    cute::SM80_16x8x16_F32BF16BF16F32_TN::fma(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3], b0, b1, d[0], d[1], d[2], d[3]);
}

// d[16x8] += a[16x8] b[8x8], bf16 in, fp32 accumulate.
__device__ __forceinline__ void mma_k8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
    cute::SM80_16x8x8_F32BF16BF16F32_TN::fma(d[0], d[1], d[2], d[3], a0, a1, b, d[0], d[1], d[2], d[3]);
}

// d[16x8] += a[16x8] b[8x8], fp32 cut to tf32 in, fp32 accumulate.
__device__ __forceinline__ void mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    cute::SM80_16x8x8_F32TF32TF32F32_TN::fma(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3], b0, b1, d[0], d[1], d[2], d[3]);
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

__device__ __forceinline__ float bf16_low(uint32_t pair) {
    return __uint_as_float(pair << 16);
}

__device__ __forceinline__ float bf16_high(uint32_t pair) {
    return __uint_as_float(pair & 0xffff0000u);
}

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float rsqrt_approx(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

}  // namespace flash_kda
