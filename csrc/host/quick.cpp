#include "host/quick.h"

#include <cmath>
#include <limits>
#include <memory>
#include <stdexcept>

#include "host/dlpack.h"

namespace flash_kda {
namespace {

constexpr long long kMost = 1ll << 30;  // of anything that is counted in int
constexpr std::uintptr_t kStateAlignment = 16;
constexpr double kLowestBound = -5.0;
constexpr long long kStateElements = static_cast<long long>(kHeadDim) * kHeadDim;

struct Torch {
    const dlpack::ExchangeApi* api = nullptr;
    PyTypeObject *tensor = nullptr, *parameter = nullptr;
    PyObject* requires_grad = nullptr;  // the attribute's name
} torch;

// A tensor, or none.
struct View {
    dlpack::Tensor raw = {};
    bool there = false;

    std::uintptr_t at() const { return reinterpret_cast<std::uintptr_t>(raw.data) + raw.byte_offset; }
    long long size(int dim) const { return raw.shape[dim]; }
    // A dimension of size one is never stepped along.
    long long stride(int dim) const { return raw.shape[dim] == 1 ? 0 : raw.strides[dim]; }
    bool is(std::uint8_t code, int bits) const { return raw.dtype.code == code && raw.dtype.bits == bits && raw.dtype.lanes == 1; }
    bool is_bf16() const { return is(dlpack::kBfloat, 16); }
    bool is_fp32() const { return is(dlpack::kFloat, 32); }
    bool shaped(std::initializer_list<long long> shape) const {
        if (raw.ndim != static_cast<int>(shape.size())) return false;
        int dim = 0;
        for (const long long expected : shape) {
            if (size(dim++) != expected) return false;
        }
        return true;
    }
    bool dense() const {
        long long step = 1;
        for (int dim = raw.ndim - 1; dim >= 0; step *= size(dim--)) {
            if (size(dim) != 1 && raw.strides[dim] != step) return false;
        }
        return true;
    }
    // From the first to behind the last element.
    long long bytes() const {
        long long last = 0;
        for (int dim = 0; dim < raw.ndim; ++dim) last += (size(dim) - 1) * stride(dim);
        return (last + 1) * (raw.dtype.bits / 8);
    }
    bool meets(const View& other) const { return there && other.there && at() < other.at() + other.bytes() && other.at() < at() + bytes(); }
    TokenTensor tokens() const { return {reinterpret_cast<const void*>(at()), {stride(0), stride(1), stride(2)}}; }
};

// Whether an argument is a plain tensor with elements, and nothing forbids to use it; or None, where that may be.
bool look(PyObject* object, bool optional, bool gradients, View& view) {
    if (object == Py_None) return optional;
    if (Py_TYPE(object) != torch.tensor && Py_TYPE(object) != torch.parameter) return false;
    if (gradients) {
        PyObject* wants = PyObject_GetAttr(object, torch.requires_grad);
        const bool plain = wants == Py_False;
        Py_XDECREF(wants);
        if (!plain) return false;
    }
    if (torch.api->describe(object, &view.raw) != 0 || view.raw.ndim == 0) return false;
    view.there = true;
    if (view.at() == 0) return false;
    for (int dim = 0; dim < view.raw.ndim; ++dim) {
        if (view.size(dim) <= 0 || view.size(dim) >= kMost || view.raw.strides[dim] < 0) return false;
    }
    return true;
}

bool take_apart(const QuickArguments& arguments, bool gradients, QuickCall& quick) {
    View q, k, v, g, beta, out, A_log, dt_bias, initial, final, offsets;
    const auto needed = [&](PyObject* object, View& view) { return look(object, false, gradients, view); };
    const auto optional = [&](PyObject* object, View& view) { return look(object, true, gradients, view); };
    if (!needed(arguments.q, q) || !needed(arguments.k, k) || !needed(arguments.v, v) || !needed(arguments.g, g) || !needed(arguments.beta, beta) ||
        !needed(arguments.out, out) || !optional(arguments.A_log, A_log) || !optional(arguments.dt_bias, dt_bias) ||
        !optional(arguments.initial_state, initial) || !optional(arguments.final_state, final) || !optional(arguments.cu_seqlens, offsets)) {
        return false;
    }
    for (const View* view : {&k, &v, &g, &beta, &out, &A_log, &dt_bias, &initial, &final, &offsets}) {
        if (view->there && (view->raw.device.type != q.raw.device.type || view->raw.device.id != q.raw.device.id)) return false;
    }

    if (q.raw.ndim != 4 || v.raw.ndim != 4) return false;
    const long long B = q.size(0), T = q.size(1), H = q.size(2), HV = v.size(2);
    if (HV % H != 0 || !q.shaped({B, T, H, kHeadDim}) || !k.shaped({B, T, H, kHeadDim})) return false;
    for (const View* rows : {&q, &k, &v, &g, &out}) {
        if (rows->raw.strides[rows->raw.ndim - 1] != 1 || !(rows->is_bf16() || (rows == &g && g.is_fp32()))) return false;
    }
    for (const View* rows : {&v, &g, &out}) {
        if (!rows->shaped({B, T, HV, kHeadDim})) return false;
    }
    if (!out.dense() || !beta.shaped({B, T, HV}) || !(beta.is_bf16() || beta.is_fp32())) return false;
    if (A_log.there && !(A_log.is_fp32() && A_log.shaped({HV}) && A_log.dense())) return false;
    if (dt_bias.there && !(dt_bias.is_fp32() && (dt_bias.shaped({HV, kHeadDim}) || dt_bias.shaped({HV * kHeadDim})) && dt_bias.dense())) return false;
    long long N = B;
    const bool is_int64 = offsets.there && offsets.is(dlpack::kInt, 64);
    if (offsets.there) {
        if (B != 1 || offsets.raw.ndim != 1 || offsets.size(0) < 2 || !offsets.dense() || !(is_int64 || offsets.is(dlpack::kInt, 32))) return false;
        N = offsets.size(0) - 1;
    }
    for (const View* states : {&initial, &final}) {
        if (!states->there) continue;
        const bool fits = states->shaped({N, HV, kHeadDim, kHeadDim}) && states->dense() && states->at() % kStateAlignment == 0;
        if (!fits || !(states->is_fp32() || states->is_bf16())) return false;
    }

    if (!PyFloat_CheckExact(arguments.scale)) return false;
    const double scale = PyFloat_AS_DOUBLE(arguments.scale);
    if (!(std::fabs(scale) <= std::numeric_limits<float>::max())) return false;
    const bool bounded = arguments.lower_bound != Py_None;
    if (bounded && !PyFloat_CheckExact(arguments.lower_bound)) return false;
    const double lower_bound = bounded ? PyFloat_AS_DOUBLE(arguments.lower_bound) : 0.0;
    if (bounded && !(kLowestBound <= lower_bound && lower_bound < 0.0)) return false;

    // Results share no memory with what is read, but that the final state may be the initial one.
    const bool in_place = initial.there && final.there && initial.at() == final.at() && initial.is_fp32() == final.is_fp32();
    for (const View* read : {&q, &k, &v, &g, &beta, &A_log, &dt_bias, &initial, &offsets}) {
        if (out.meets(*read) || (final.meets(*read) && !(read == &initial && in_place))) return false;
    }
    if (out.meets(final)) return false;

    quick = {};
    quick.device_type = q.raw.device.type, quick.device = q.raw.device.id;
    quick.call.B = static_cast<int>(B);
    ForwardParams& params = quick.call.params;
    params.q = q.tokens(), params.k = k.tokens(), params.v = v.tokens(), params.g = g.tokens(), params.beta = beta.tokens(),
    params.out = out.tokens();
    const auto floats = [](const View& view) { return view.there ? reinterpret_cast<const float*>(view.at()) : nullptr; };
    params.A_log = floats(A_log), params.dt_bias = floats(dt_bias);
    params.cu_seqlens = offsets.there ? reinterpret_cast<const void*>(offsets.at()) : nullptr;
    params.cu_seqlens_is_int64 = is_int64;
    const auto states = [&](const View& view) -> StateTensor {
        if (!view.there) return {nullptr, 0, 0};
        return {reinterpret_cast<void*>(view.at()), HV * kStateElements, view.is_fp32()};
    };
    params.initial = states(initial), params.final = states(final);
    params.gate = bounded ? Gate::kBounded : Gate::kUnbounded;
    params.lower_bound = static_cast<float>(lower_bound);
    params.g_is_fp32 = g.is_fp32(), params.beta_is_fp32 = beta.is_fp32();
    params.normalise = params.beta_is_logit = 1;
    params.beta_factor = 1.f;
    params.T = static_cast<int>(T), params.H = static_cast<int>(HV), params.group = static_cast<int>(HV / H), params.N = static_cast<int>(N);
    params.scale = static_cast<float>(scale);
    return true;
}

struct Delete {
    void operator()(dlpack::ManagedTensor* tensor) const { tensor->deleter(tensor); }
};

// Memory from torch's allocator, for the current stream; null if there is none.
std::unique_ptr<dlpack::ManagedTensor, Delete> allocate(std::size_t bytes, dlpack::Device device) {
    std::int64_t shape[1] = {static_cast<std::int64_t>(bytes)};
    dlpack::Tensor prototype = {nullptr, device, 1, {dlpack::kUInt, 8, 1}, shape, nullptr, 0};
    dlpack::ManagedTensor* memory = nullptr;
    const auto ignore = [](void*, const char*, const char*) {};
    if (torch.api->allocate(&prototype, &memory, nullptr, ignore) != 0) return nullptr;
    return std::unique_ptr<dlpack::ManagedTensor, Delete>(memory);
}

}  // namespace

bool quick_setup(PyObject* tensor_type, PyObject* parameter_type, PyObject* capsule) {
    if (!PyCapsule_IsValid(capsule, dlpack::kCapsule)) return false;
    const auto* api = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule, dlpack::kCapsule));
    if (api->version.major != dlpack::kMajor || api->describe == nullptr) return false;
    // Kept for as long as the process lives, as the module is.
    Py_INCREF(tensor_type), Py_INCREF(parameter_type), Py_INCREF(capsule);
    torch.tensor = reinterpret_cast<PyTypeObject*>(tensor_type), torch.parameter = reinterpret_cast<PyTypeObject*>(parameter_type);
    torch.requires_grad = PyUnicode_InternFromString("requires_grad");
    torch.api = api;
    return true;
}

bool quick_take_apart(const QuickArguments& arguments, bool gradients, QuickCall& quick) {
    if (torch.api == nullptr) return false;
    const bool usual = take_apart(arguments, gradients, quick);
    if (!usual) PyErr_Clear();  // what cannot be described (sparse, without storage) is for the long way to say
    return usual;
}

bool quick_launch(const QuickCall& quick) {
    const ForwardParams& params = quick.call.params;
    const std::size_t size = forward_workspace(quick.device, params.T, params.H, params.N, params.cu_seqlens != nullptr, false);
    void* stream = nullptr;
    if (torch.api->current_stream(quick.device_type, quick.device, &stream) != 0) throw std::runtime_error("flash_kda: torch has no current stream");
    ForwardCall call = quick.call;
    // Held until the launch has returned: from then on, whoever is given the memory next on this stream comes after the kernels.
    std::unique_ptr<dlpack::ManagedTensor, Delete> workspace;
    if (size > 0) {
        workspace = allocate(size, {quick.device_type, quick.device});
        if (!workspace) return false;
        call.workspace = reinterpret_cast<std::uintptr_t>(workspace->tensor.data) + workspace->tensor.byte_offset;
        call.workspace_bytes = size;
    }
    launch_forward(quick.device, reinterpret_cast<std::uintptr_t>(stream), call);
    return true;
}

}  // namespace flash_kda
