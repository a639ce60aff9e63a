// The part of DLPack's C interface that quick.cpp uses, version 1 (https://dmlc.github.io/dlpack): layouts are fixed within a major version.
#pragma once

#include <cstdint>

namespace flash_kda::dlpack {

inline constexpr std::uint32_t kMajor = 1;
inline constexpr std::int32_t kCuda = 2;
inline constexpr std::uint8_t kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4;

struct Version {
    std::uint32_t major, minor;
};

struct Device {
    std::int32_t type, id;
};

struct DataType {
    std::uint8_t code, bits;
    std::uint16_t lanes;
};

struct Tensor {
    void* data;
    Device device;
    std::int32_t ndim;
    DataType dtype;
    std::int64_t* shape;
    std::int64_t* strides;  // in elements
    std::uint64_t byte_offset;
};

struct ManagedTensor {
    Version version;
    void* manager;
    void (*deleter)(ManagedTensor*);
    std::uint64_t flags;
    Tensor tensor;
};

// In a PyCapsule of this name, at torch.Tensor.__dlpack_c_exchange_api__.
inline constexpr const char* kCapsule = "dlpack_exchange_api";

struct ExchangeApi {
    Version version;
    const void* older;
    int (*allocate)(Tensor* prototype, ManagedTensor** out, void* context, void (*set_error)(void* context, const char* kind, const char* message));
    int (*to_managed)(void* object, ManagedTensor** out);
    int (*from_managed)(ManagedTensor* tensor, void** out);
    int (*describe)(void* object, Tensor* out);  // borrowed; may be null
    int (*current_stream)(std::int32_t device_type, std::int32_t device, void** out);
};

}  // namespace flash_kda::dlpack
