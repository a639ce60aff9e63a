// The usual call, taken apart in C++ where torch gives tensors to C: DLPack's exchange API (torch 2.10 and newer). A call costs a third of the host time then.
//
// It takes what most calls are and refuses the rest without a word: then flash_kda/checks.py looks at the call, which knows every form and words every error. So
// whatever is taken here must be accepted there, with the same result (tests/cpu/test_quick.py).
#pragma once

#include <Python.h>

#include "host/forward.h"

namespace flash_kda {

// As flash_kda.fwd takes them, in its order.
struct QuickArguments {
    PyObject *q, *k, *v, *g, *beta, *scale, *out, *A_log, *dt_bias, *lower_bound, *initial_state, *final_state, *cu_seqlens;
};
inline constexpr int kQuickArguments = 13;
inline constexpr int kQuickDevice = 2;  // a CUDA device, as DLPack says

// What torch offers: its tensor types, and the capsule of its exchange API. Whether this module can use it. Once, before any other call here.
bool quick_setup(PyObject* tensor_type, PyObject* parameter_type, PyObject* capsule);

// Whether it is the usual call, of tensors on one device; then its parameters but for the workspace. `gradients`: they are recorded now, so no tensor may want one.
// Never raises.
struct QuickCall {
    ForwardCall call;
    int device_type, device;  // as DLPack says
};
bool quick_take_apart(const QuickArguments& arguments, bool gradients, QuickCall& quick);

// Launches it on torch's current stream, with a workspace from torch's allocator; false if that has none to give. Throws as launch_forward does. Needs no GIL.
bool quick_launch(const QuickCall& quick);

}  // namespace flash_kda
