// flash_kda._native: the C++ side as Python sees it. No logic here.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "host/device.h"
#include "host/embedded.h"
#include "host/forward.h"
#include "host/quick.h"

namespace py = pybind11;
using namespace py::literals;
using namespace flash_kda;

namespace {

using Strides = std::array<long long, 3>;

// As flash_kda/checks.py hands them over: addresses, dtypes and counts.
using Slots = std::tuple<std::uintptr_t, bool, int>;      // of int64 (or int32) indices; rows of the pools
using Snapshots = std::tuple<std::uintptr_t, bool, int>;  // of fp32 (or bf16) states; how many
using Checkpoints =
    std::tuple<std::uintptr_t, bool, int, std::uintptr_t, bool>;  // of fp32 (or bf16) states; a sequence's; of int64 (or int32) offsets

TokenTensor tokens(std::uintptr_t data, const Strides& strides) {
    return {reinterpret_cast<const void*>(data), {strides[0], strides[1], strides[2]}};
}

StateTensor states(std::uintptr_t data, long long row, bool is_fp32) {
    return {reinterpret_cast<void*>(data), row, is_fp32};
}

IndexTensor integers(std::uintptr_t data, bool is_int64) {
    return {reinterpret_cast<const void*>(data), is_int64};
}

py::dict describe(const EmbeddedCubin& cubin) {
    return py::dict("unit"_a = cubin.unit, "arch"_a = cubin.arch, "sha256"_a = cubin.sha256, "size"_a = cubin.end - cubin.begin);
}

py::list embedded() {
    py::list list;
    for (std::size_t i = 0; i < kEmbeddedCubinCount; ++i) list.append(describe(kEmbeddedCubins[i]));
    return list;
}

py::dict driver() {
    const Driver& driver = Driver::get();
    return py::dict("loaded"_a = driver.loaded, "version"_a = driver.loaded ? py::object(py::int_(driver.version)) : py::none(),
                    "reason"_a = driver.reason);
}

py::dict device(int index) {
    const DeviceInfo info = device_info(index);
    return py::dict("name"_a = info.name, "major"_a = info.major, "minor"_a = info.minor, "sm_count"_a = info.sm_count,
                    "total_memory"_a = info.total_memory, "shared_memory_per_block_optin"_a = info.shared_memory_per_block_optin);
}

py::dict selection(int index) {
    const Choice choice = choose_kernel(device_info(index));
    py::dict selection = describe(*choice.cubin);
    selection["kernel"] = choice.kernel->name;
    return selection;
}

void forward(int device, std::uintptr_t stream, std::uintptr_t q, std::uintptr_t k, std::uintptr_t v, std::uintptr_t g, std::uintptr_t beta,
             std::uintptr_t out, const Strides& q_strides, const Strides& k_strides, const Strides& v_strides, const Strides& g_strides,
             const Strides& beta_strides, const Strides& out_strides, int B, int T, int H, int HV, int N, std::uintptr_t A_log,
             std::uintptr_t dt_bias, std::uintptr_t initial_state, bool initial_is_fp32, long long initial_row, std::uintptr_t final_state,
             bool final_is_fp32, long long final_row, std::uintptr_t cu_seqlens, bool cu_is_int64, float scale, std::optional<float> lower_bound,
             bool g_is_fp32, bool beta_is_fp32, bool normalise, bool gate, bool sigmoid, bool twice, bool v_first, bool whole,
             const std::optional<Slots>& slots, const std::optional<Snapshots>& snapshots, const std::optional<Checkpoints>& checkpoints,
             std::uintptr_t workspace, std::size_t workspace_bytes) {
    ForwardCall call = {};
    call.B = B;
    call.whole = whole;
    call.workspace = workspace;
    call.workspace_bytes = workspace_bytes;
    ForwardParams& params = call.params;
    params.q = tokens(q, q_strides);
    params.k = tokens(k, k_strides);
    params.v = tokens(v, v_strides);
    params.g = tokens(g, g_strides);
    params.beta = tokens(beta, beta_strides);
    params.out = tokens(out, out_strides);
    params.A_log = reinterpret_cast<const float*>(A_log);
    params.dt_bias = reinterpret_cast<const float*>(dt_bias);
    params.cu_seqlens = reinterpret_cast<const void*>(cu_seqlens);
    params.cu_seqlens_is_int64 = cu_is_int64;
    params.initial = states(initial_state, initial_row, initial_is_fp32);
    params.final = states(final_state, final_row, final_is_fp32);
    const long long row = static_cast<long long>(HV) * kHeadDim * kHeadDim;
    if (slots) {
        const auto& [indices, is_int64, rows] = *slots;
        params.slots = integers(indices, is_int64);
        params.pool_rows = rows;
    }
    if (snapshots) {
        const auto& [data, is_fp32, rows] = *snapshots;
        params.snapshots = states(data, row, is_fp32);
        params.snapshot_rows = rows;
    }
    if (checkpoints) {
        const auto& [data, is_fp32, each, offsets, is_int64] = *checkpoints;
        params.checkpoints = states(data, row, is_fp32);
        params.marks = integers(offsets, is_int64);
        params.marks_each = each;
    }
    params.saves = snapshots || checkpoints;
    params.key_first = !v_first;
    params.gate = !gate ? Gate::kLogDecay : lower_bound ? Gate::kBounded : Gate::kUnbounded;
    params.lower_bound = lower_bound.value_or(0.f);
    params.g_is_fp32 = g_is_fp32;
    params.normalise = normalise;
    params.beta_is_fp32 = beta_is_fp32;
    params.beta_is_logit = sigmoid;
    params.beta_factor = twice ? 2.f : 1.f;
    params.T = T;
    params.H = HV;
    params.group = H > 0 ? HV / H : 1;
    params.N = N;
    params.scale = scale;
    py::gil_scoped_release release;
    launch_forward(device, stream, call);
}

// The arguments of flash_kda.fwd up to cu_seqlens, then whether gradients are recorded.
bool take_apart(PyObject* const* arguments, Py_ssize_t count, QuickCall& call) {
    if (count != kQuickArguments + 1)
        throw py::type_error("expected " + std::to_string(kQuickArguments + 1) + " arguments, got " + std::to_string(count));
    QuickArguments named;
    static_assert(sizeof(named) == kQuickArguments * sizeof(PyObject*));
    std::copy_n(arguments, kQuickArguments, &named.q);
    return quick_take_apart(named, arguments[kQuickArguments] == Py_True, call);
}

// By Python's own calling convention: pybind11's would cost as much as the call.
PyObject* quick(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    try {
        QuickCall call;
        bool done = take_apart(arguments, count, call) && call.device_type == kQuickDevice;
        if (done) {
            py::gil_scoped_release release;
            done = quick_launch(call);
        }
        return PyBool_FromLong(done);
    } catch (py::builtin_exception& error) {
        error.set_error();
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return nullptr;
}

PyMethodDef quick_definition = {
    "quick", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&quick)), METH_FASTCALL,
    "Launches the usual call; False, and nothing done, if it is not one. Arguments: those of fwd up to cu_seqlens, then whether gradients "
    "are recorded."};

// What quick would launch, in the order of forward's arguments from q to whole; None if it is not the usual call. For tests: on any device.
py::object quick_arguments(const py::args& arguments) {
    std::vector<PyObject*> objects;
    for (const py::handle& argument : arguments) objects.push_back(argument.ptr());
    QuickCall quick;
    if (!take_apart(objects.data(), static_cast<Py_ssize_t>(objects.size()), quick)) return py::none();
    const ForwardParams& p = quick.call.params;
    const auto at = [](const void* data) { return reinterpret_cast<std::uintptr_t>(data); };
    const auto steps = [](const TokenTensor& tensor) { return py::make_tuple(tensor.strides.batch, tensor.strides.token, tensor.strides.head); };
    return py::make_tuple(
        at(p.q.data), at(p.k.data), at(p.v.data), at(p.g.data), at(p.beta.data), at(p.out.data), steps(p.q), steps(p.k), steps(p.v), steps(p.g),
        steps(p.beta), steps(p.out), quick.call.B, p.T, p.H / p.group, p.H, p.N, at(p.A_log), at(p.dt_bias), at(p.initial.data),
        p.initial.is_fp32 != 0, p.initial.row, at(p.final.data), p.final.is_fp32 != 0, p.final.row, at(p.cu_seqlens), p.cu_seqlens_is_int64 != 0,
        p.scale, p.gate == Gate::kBounded ? py::object(py::float_(p.lower_bound)) : py::none(), p.g_is_fp32 != 0, p.beta_is_fp32 != 0,
        p.normalise != 0, p.gate != Gate::kLogDecay, p.beta_is_logit != 0, p.beta_factor == 2.f, p.key_first == 0, quick.call.whole);
}

}  // namespace

PYBIND11_MODULE(_native, m) {
    m.doc() = "CUDA kernels of flash_kda and their launch. Needs neither torch nor a CUDA library; opens the driver at first use.";
    m.def("embedded", &embedded, "Device code in this module: list of dicts unit, arch, sha256, size.");
    m.def("build_record", [] { return kBuildRecord; }, "JSON: version, lock digest, toolchain, setting, cubins with their resources.");
    m.def("driver", &driver, "dict loaded, version, reason. Never raises.");
    m.def("device_count", &device_count, "Visible CUDA devices; 0 without a working driver.");
    m.def("device_info", &device, "index"_a);
    m.def("select", &selection, "index"_a,
          "What this device uses: dict unit, arch, sha256, size of the cubin, and kernel, its entry's name. RuntimeError with the reason if none "
          "fits.");
    m.def("segments", &forward_segments, "device"_a, "T"_a, "H"_a, "N"_a, "has_offsets"_a, "whole"_a,
          "Into how many segments forward cuts each of N sequences of at most T tokens. RuntimeError if no kernel fits the device.");
    m.def("workspace_size", &forward_workspace, "device"_a, "T"_a, "H"_a, "N"_a, "has_offsets"_a, "whole"_a,
          "Bytes of workspace that forward needs for N sequences of at most T tokens. RuntimeError if no kernel fits the device.");
    m.def("forward", &forward, "device"_a, "stream"_a, "q"_a, "k"_a, "v"_a, "g"_a, "beta"_a, "out"_a, "q_strides"_a, "k_strides"_a, "v_strides"_a,
          "g_strides"_a, "beta_strides"_a, "out_strides"_a, "B"_a, "T"_a, "H"_a, "HV"_a, "N"_a, "A_log"_a, "dt_bias"_a, "initial_state"_a,
          "initial_is_fp32"_a, "initial_row"_a, "final_state"_a, "final_is_fp32"_a, "final_row"_a, "cu_seqlens"_a, "cu_is_int64"_a, "scale"_a,
          "lower_bound"_a, "g_is_fp32"_a, "beta_is_fp32"_a, "normalise"_a, "gate"_a, "sigmoid"_a, "twice"_a, "v_first"_a, "whole"_a, "slots"_a,
          "intermediate"_a, "checkpoints"_a, "workspace"_a, "workspace_bytes"_a,
          "Launches one call on `stream` of `device`. Pointers are integers, 0 = absent; strides are (batch, token, head) and rows of states, in "
          "elements.");
    m.def(
        "quick_setup",
        [](const py::object& tensor, const py::object& parameter, const py::object& capsule) {
            return quick_setup(tensor.ptr(), parameter.ptr(), capsule.ptr());
        },
        "Tensor"_a, "Parameter"_a, "exchange_api"_a, "Tells quick of torch. False if this torch's exchange API is none that it knows.");
    m.attr("quick") = py::reinterpret_steal<py::object>(PyCFunction_New(&quick_definition, nullptr));
    m.def("quick_arguments", &quick_arguments,
          "What quick would launch, in the order of forward's arguments from q on; None: nothing. On any device.");
}
