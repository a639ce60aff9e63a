"""Every refusal of ``fwd``: its type, what it says, and that nothing was written before it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

import flash_kda  # noqa: E402

BF16 = torch.bfloat16
B, T, H, K = 1, 12, 3, 128


def arguments(**changes: Any) -> dict[str, Any]:
    """A right call with everything given, but for the changes."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    call = {
        "q": normal(B, T, H, K).to(BF16),
        "k": normal(B, T, H, K).to(BF16),
        "v": normal(B, T, H, K).to(BF16),
        "g": normal(B, T, H, K).to(BF16),
        "beta": normal(B, T, H).to(BF16),
        "scale": K**-0.5,
        "out": torch.full((B, T, H, K), 7.0, dtype=BF16),
        "A_log": normal(H),
        "dt_bias": normal(H, K),
        "lower_bound": -5.0,
        "initial_state": normal(2, H, K, K),
        "final_state": torch.full((2, H, K, K), 7.0),
        "cu_seqlens": torch.tensor([0, 5, T]),
    }
    assert changes.keys() <= inspect.signature(flash_kda.fwd).parameters.keys()
    return {**call, **changes}


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=BF16)


def heads_first() -> dict[str, Any]:
    """Everything as [B, H, T, D], consistently: only A_log and dt_bias know better."""
    rows = {name: bf16(B, H, T, K) for name in ("q", "k", "v", "g", "out")}
    return {**rows, "beta": bf16(B, H, T)}


def columns(dtype: torch.dtype, width: int, offset: int) -> torch.Tensor:
    """[B, T, H, K] inside rows of ``width`` elements, from ``offset`` on."""
    return torch.zeros(B, T, width, dtype=dtype)[:, :, offset : offset + H * K].unflatten(-1, (H, K))


def odd_address(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = int(np.prod(shape))
    return torch.zeros(count + 1, dtype=dtype)[1:].view(shape)


def shared(first: str, second: str, offset: int = 0) -> dict[str, Any]:
    """``second`` lies in the memory of ``first``."""
    call = arguments()
    count = max(call[first].numel() * call[first].element_size(), call[second].numel() * call[second].element_size())
    memory = torch.zeros(count + 2 * offset, dtype=torch.uint8)

    def place(name: str, at: int) -> torch.Tensor:
        like = call[name]
        size = like.numel() * like.element_size()
        return memory[at : at + size].view(like.dtype).view(like.shape)

    return {first: place(first, 0), second: place(second, offset)}


# name: (what to change, error, texts that the message must hold)
REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], type[Exception], list[str]]] = {
    # not a tensor, not a number
    "q is a list": (lambda: {"q": [1.0]}, TypeError, ["q: expected a torch.Tensor, got list"]),
    "k is None": (lambda: {"k": None}, TypeError, ["k: expected a torch.Tensor, got NoneType"]),
    "v is numpy": (lambda: {"v": np.zeros((B, T, H, K))}, TypeError, ["v: expected a torch.Tensor", "ndarray"]),
    "g is None": (lambda: {"g": None}, TypeError, ["g: expected"]),
    "beta is a float": (lambda: {"beta": 0.5}, TypeError, ["beta: expected a torch.Tensor, got float"]),
    "A_log is a float": (lambda: {"A_log": 1.0}, TypeError, ["A_log: expected a torch.Tensor or None, got float"]),
    "dt_bias is a list": (lambda: {"dt_bias": [0.0]}, TypeError, ["dt_bias: expected a torch.Tensor or None, got list"]),
    "out is True": (lambda: {"out": True}, TypeError, ["out: expected a torch.Tensor or None, got bool"]),
    "final_state is True": (lambda: {"final_state": True}, TypeError, ["final_state", "in place", "[N, HV, V, K]"]),
    "initial_state is 0": (lambda: {"initial_state": 0}, TypeError, ["initial_state: expected a torch.Tensor or None"]),
    "cu_seqlens is a list": (lambda: {"cu_seqlens": [0, 5, 12]}, TypeError, ["cu_seqlens", "torch.tensor(cu_seqlens"]),
    "scale is None": (lambda: {"scale": None}, TypeError, ["scale: expected a Python number", "128 ** -0.5"]),
    "scale is a tensor": (lambda: {"scale": torch.tensor(1.0)}, TypeError, ["scale", "float(scale)"]),
    "scale is text": (lambda: {"scale": "1"}, TypeError, ["scale", "got str"]),
    "scale is True": (lambda: {"scale": True}, TypeError, ["scale", "got bool"]),
    "lower_bound is text": (lambda: {"lower_bound": "-5"}, TypeError, ["lower_bound", "got str"]),
    "lower_bound is a tensor": (lambda: {"lower_bound": torch.tensor(-5.0)}, TypeError, ["float(lower_bound)"]),
    # ranges
    "scale is infinite": (lambda: {"scale": float("inf")}, ValueError, ["scale", "finite in fp32", "inf"]),
    "scale is not a number": (lambda: {"scale": float("nan")}, ValueError, ["scale", "nan"]),
    "scale overflows fp32": (lambda: {"scale": 1e39}, ValueError, ["scale", "fp32", "1e+39"]),
    "scale overflows every float": (lambda: {"scale": 10**400}, ValueError, ["scale", "128 ** -0.5", "overflows"]),
    "lower_bound overflows every float": (lambda: {"lower_bound": -(10**400)}, ValueError, ["lower_bound", "-5.0", "overflows"]),
    "lower_bound is positive": (lambda: {"lower_bound": 5.0}, ValueError, ["[-5.0, 0)", "got 5.0", "-5.0?"]),
    "lower_bound is 0": (lambda: {"lower_bound": 0}, ValueError, ["[-5.0, 0)", "got 0.0", "decay"]),
    "lower_bound is too low": (lambda: {"lower_bound": -5.001}, ValueError, ["[-5.0, 0)", "got -5.001", "not supported"]),
    "lower_bound is nan": (lambda: {"lower_bound": float("nan")}, ValueError, ["[-5.0, 0)", "got nan"]),
    "lower_bound is -inf": (lambda: {"lower_bound": float("-inf")}, ValueError, ["[-5.0, 0)", "got -inf"]),
    # shapes
    "q is [T, H, D]": (lambda: {"q": bf16(T, H, K)}, ValueError, ["[B, T, H, 128]", "[12, 3, 128]", "unsqueeze(0)"]),
    "q is [B, T, H * D]": (lambda: {"q": bf16(B, T, H * K)}, ValueError, ["[1, 12, 384]", "q.view(B, T, H, 128)"]),
    "q is 5-D": (lambda: {"q": bf16(1, B, T, H, K)}, ValueError, ["q: expected [B, T, H, 128], got [1, 1, 12, 3, 128]"]),
    "q is a scalar": (lambda: {"q": torch.tensor(1.0)}, ValueError, ["q: expected [B, T, H, 128], got []"]),
    "head dimension 64": (lambda: {"q": bf16(B, T, H, 64)}, ValueError, ["[1, 12, 3, 64]", "Only head dimension 128"]),
    "q is [B, T, D, H]": (lambda: {"q": bf16(B, T, K, H)}, ValueError, ["[1, 12, 128, 3]", "comes last"]),
    "all are [B, H, T, D]": (heads_first, ValueError, ["A_log", "[B, H, T, D]", "transpose(1, 2)"]),
    "k is [B, H, T, D]": (lambda: {"k": bf16(B, H, T, K)}, ValueError, ["k: ", "[1, 3, 12, 128]", "[B, H, T, D]"]),
    "q and k are [B, H, T, D]": (
        lambda: {"q": bf16(B, H, T, K), "k": bf16(B, H, T, K)}, ValueError, ["v: ", "[B, H, T, D]"],
    ),
    "rows are [B, H, T, D], beta is not": (
        lambda: {**heads_first(), "beta": bf16(B, T, H)}, ValueError, ["beta", "q looks like [B, H, T, D]", "3 heads"],
    ),
    "k is shorter": (lambda: {"k": bf16(B, T - 1, H, K)}, ValueError, ["k: expected the shape of q", "[1, 11, 3, 128]"]),
    "no multiple of the heads": (lambda: {"v": bf16(B, T, H + 1, K)}, ValueError, ["v: ", "a multiple of q's 3 heads", "[1, 12, 4, 128]"]),
    "fewer value heads": (lambda: {"v": bf16(B, T, 1, K)}, ValueError, ["v: ", "a multiple of q's 3 heads"]),
    "no value heads": (lambda: {"v": bf16(B, T, 0, K)}, ValueError, ["v: ", "a multiple of q's 3 heads"]),
    "more value heads than gates": (
        lambda: {"v": bf16(B, T, 2 * H, K)}, ValueError, ["g: expected the shape of v", "[1, 12, 6, 128]", "[1, 12, 3, 128]"],
    ),
    "more key heads": (lambda: {"k": bf16(B, T, 2 * H, K)}, ValueError, ["k: ", "Only value heads may be more"]),
    "grouped, one beta a query head": (
        lambda: {**{n: bf16(B, T, 2 * H, K) for n in ("v", "g", "out")}}, ValueError, ["beta", "[1, 12, 6]", "per value head"],
    ),
    "grouped, one A_log a query head": (
        lambda: {**{n: bf16(B, T, 2 * H, K) for n in ("v", "g", "out")}, "beta": bf16(B, T, 2 * H)}, ValueError,
        ["A_log: expected [HV] = [6]", "per value head"],
    ),
    "grouped, one state a query head": (
        lambda: {
            **{n: bf16(B, T, 2 * H, K) for n in ("v", "g", "out")}, "beta": bf16(B, T, 2 * H), "A_log": None, "dt_bias": None,
        },
        ValueError, ["initial_state", "[2, 6, 128, 128]", "per value head"],
    ),
    "value dimension 256": (lambda: {"v": bf16(B, T, H, 256)}, ValueError, ["v: ", "Only head dimension 128"]),
    "gate per head": (lambda: {"g": bf16(B, T, H)}, ValueError, ["g: ", "per channel"]),
    "v is [B, T, H * D]": (lambda: {"v": bf16(B, T, H * K)}, ValueError, ["v: ", "v.view(1, 12, 3, 128)"]),
    "out is shorter": (lambda: {"out": bf16(B, T - 1, H, K)}, ValueError, ["out: expected the shape of v"]),
    "beta is [B, H, T]": (lambda: {"beta": bf16(B, H, T)}, ValueError, ["beta: expected [B, T, HV]", "beta.transpose(1, 2)"]),
    "beta is [B, T, H, 1]": (lambda: {"beta": bf16(B, T, H, 1)}, ValueError, ["[1, 12, 3, 1]", "beta.squeeze(-1)"]),
    "beta per channel": (lambda: {"beta": bf16(B, T, H, K)}, ValueError, ["beta", "not one per channel"]),
    "beta is [T, H]": (lambda: {"beta": bf16(T, H)}, ValueError, ["beta: expected [B, T, HV] = [1, 12, 3]", "[12, 3]"]),
    "A_log is [1, 1, H, 1]": (lambda: {"A_log": torch.zeros(1, 1, H, 1)}, ValueError, ["A_log: expected [HV]", "view(-1)"]),
    "A_log has other heads": (lambda: {"A_log": torch.zeros(H + 1)}, ValueError, ["A_log: expected [HV] = [3]", "[4]"]),
    "dt_bias is [K, H]": (lambda: {"dt_bias": torch.zeros(K, H)}, ValueError, ["dt_bias", "[128, 3]", "view(3, 128)"]),
    "dt_bias is [H]": (lambda: {"dt_bias": torch.zeros(H)}, ValueError, ["dt_bias", "per head and channel", "unsqueeze"]),
    "dt_bias is [K]": (lambda: {"dt_bias": torch.zeros(K)}, ValueError, ["dt_bias", "per head and channel", "expand"]),
    "cu_seqlens is 2-D": (lambda: {"cu_seqlens": torch.zeros(1, 3).long()}, ValueError, ["[N + 1]", "[1, 3]"]),
    "cu_seqlens is empty": (lambda: {"cu_seqlens": torch.zeros(0).long()}, ValueError, ["[N + 1]", "beginning with 0", "[0]"]),
    "cu_seqlens with B == 2": (
        lambda: {**{n: bf16(2, T, H, K) for n in ("q", "k", "v", "g", "out")}, "beta": bf16(2, T, H)},
        ValueError, ["cu_seqlens", "B == 1", "B == 2", "[1, 24, ...]"],
    ),
    "initial_state for other sequences": (
        lambda: {"initial_state": torch.zeros(3, H, K, K)}, ValueError,
        ["initial_state", "[N, HV, V, K] = [2, 3, 128, 128]", "len(cu_seqlens) - 1", "[3, 3, 128, 128]", "state_indices"],
    ),
    "final_state without cu_seqlens": (
        lambda: {"cu_seqlens": None, "initial_state": None}, ValueError, ["final_state", "[1, 3, 128, 128]", "N = B"],
    ),
    "initial_state is [H, V, K]": (
        lambda: {"cu_seqlens": None, "final_state": None, "initial_state": torch.zeros(H, K, K)}, ValueError,
        ["initial_state", "unsqueeze(0)"],
    ),
    # dtypes
    "q is fp16": (lambda: {"q": bf16(B, T, H, K).half()}, TypeError, ["q: expected bfloat16, got float16", "to(torch.bfloat16)"]),
    "k is fp32": (lambda: {"k": bf16(B, T, H, K).float()}, TypeError, ["k: expected bfloat16, got float32"]),
    "v is int": (lambda: {"v": bf16(B, T, H, K).int()}, TypeError, ["v: expected bfloat16, got int32"]),
    "g is fp16": (lambda: {"g": bf16(B, T, H, K).half()}, TypeError, ["g: expected bfloat16 or float32, got float16"]),
    "beta is fp64": (lambda: {"beta": bf16(B, T, H).double()}, TypeError, ["beta: expected bfloat16 or float32, got float64"]),
    "out is fp32": (lambda: {"out": bf16(B, T, H, K).float()}, TypeError, ["out: expected bfloat16, got float32"]),
    "A_log is bf16": (lambda: {"A_log": bf16(H)}, TypeError, ["A_log: expected float32, got bfloat16", "A_log.float()"]),
    "dt_bias is fp64": (lambda: {"dt_bias": torch.zeros(H, K).double()}, TypeError, ["dt_bias", "float64", "float()"]),
    "initial_state is fp16": (
        lambda: {"initial_state": torch.zeros(2, H, K, K).half()}, TypeError, ["initial_state: expected float32 or bfloat16"],
    ),
    "final_state is fp64": (
        lambda: {"final_state": torch.zeros(2, H, K, K).double()}, TypeError, ["final_state: expected float32 or bfloat16"],
    ),
    "cu_seqlens is float": (
        lambda: {"cu_seqlens": torch.tensor([0.0, 5.0, 12.0])}, TypeError, ["cu_seqlens: expected int32 or int64", "torch.int32"],
    ),
    # devices
    **{
        f"{name} is elsewhere": (
            lambda name=name: {name: arguments()[name].to("meta")}, ValueError, [f"{name}: expected it on cpu like q, got meta"],
        )
        for name in ("k", "v", "g", "beta", "out", "A_log", "dt_bias", "initial_state", "final_state", "cu_seqlens")
    },
    "all are on a device without a kernel": (
        lambda: {n: x.to("meta") for n, x in arguments().items() if isinstance(x, torch.Tensor)}, ValueError, ["CUDA or CPU", "meta"],
    ),
    # layouts
    "last dimension is not dense": (
        lambda: {"q": bf16(B, T, K, H).transpose(2, 3)}, ValueError, ["q: expected a dense last dimension", "q.contiguous()"],
    ),
    "every second channel": (lambda: {"v": bf16(B, T, H, 2 * K)[..., ::2]}, ValueError, ["v: expected a dense last"]),
    "out is expanded": (lambda: {"out": bf16(B, T, 1, K).expand(B, T, H, K)}, ValueError, ["out: ", "memory of their own"]),
    "out rows overlap": (
        lambda: {"out": bf16(1, 4096, 1, 1).view(-1).as_strided((B, T, H, K), (0, 64, 128, 1))}, ValueError,
        ["out: ", "memory of their own"],
    ),
    "A_log is strided": (lambda: {"A_log": torch.zeros(2 * H)[::2]}, ValueError, ["A_log: expected a contiguous"]),
    "dt_bias is transposed": (lambda: {"dt_bias": torch.zeros(K, H).t()}, ValueError, ["dt_bias: expected a contiguous"]),
    "cu_seqlens is strided": (
        lambda: {"cu_seqlens": torch.tensor([0, 1, 5, 6, 12])[::2]}, ValueError, ["cu_seqlens: expected a contiguous"],
    ),
    "initial_state is transposed": (
        lambda: {"initial_state": torch.zeros(2, H, K, K).transpose(2, 3)}, ValueError, ["initial_state: expected a contiguous"],
    ),
    "final_state is transposed": (
        lambda: {"final_state": torch.zeros(2, H, K, K).transpose(2, 3)}, ValueError,
        ["final_state: expected a contiguous", "to write into"],
    ),
    "initial_state at an odd address": (
        lambda: {"initial_state": odd_address((2, H, K, K), torch.float32)}, ValueError,
        ["initial_state", "multiple of 16 bytes"],
    ),
    "initial_state is transposed, K first": (
        lambda: {"initial_state": torch.zeros(2, H, K, K).transpose(2, 3), "state_v_first": False}, ValueError,
        ["initial_state: expected a contiguous"],
    ),
    "rows of initial_state overlap": (
        lambda: {"initial_state": torch.zeros(1, H, K, K).expand(2, H, K, K)}, ValueError, ["initial_state: expected a contiguous"],
    ),
    "rows of final_state at odd distances": (
        lambda: {"final_state": torch.zeros(2, H * K * K + 2)[:, :-2].view(2, H, K, K)}, ValueError,
        ["final_state: expected rows that are a multiple of 16 bytes apart", "got 196616"],
    ),
    # switches
    **{
        f"{name} is 1": (
            lambda name=name: {name: 1}, TypeError, [f"{name}: expected True or False, got int 1"],
        )
        for name in (
            "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval",
            "state_v_first", "batch_invariant",
        )
    },
    "a log-decay with A_log": (
        lambda: {"use_gate_in_kernel": False}, ValueError, ["A_log: expected None with use_gate_in_kernel=False", "log-decay itself"],
    ),
    "a log-decay with dt_bias": (
        lambda: {"use_gate_in_kernel": False, "A_log": None}, ValueError, ["dt_bias: expected None with use_gate_in_kernel=False"],
    ),
    "a log-decay with a bound": (
        lambda: {"use_gate_in_kernel": False, "A_log": None, "dt_bias": None}, ValueError,
        ["lower_bound: expected None with use_gate_in_kernel=False", "got float"],
    ),
    # pools
    "state_indices is a list": (
        lambda: {"state_indices": [0, 1]}, TypeError, ["state_indices: expected a torch.Tensor or None, got list", "torch.tensor(state_indices"],
    ),
    "an index is missing": (lambda: {"state_indices": torch.zeros(1).int()}, ValueError, ["state_indices: expected [2], got [1]"]),
    "indices are floats": (lambda: {"state_indices": torch.zeros(2)}, TypeError, ["state_indices: expected int32 or int64"]),
    "indices are strided": (
        lambda: {"state_indices": torch.arange(4)[::2]}, ValueError, ["state_indices: expected a contiguous"],
    ),
    "an index twice": (
        lambda: {"state_indices": torch.tensor([1, 1])}, ValueError, ["state_indices: expected different rows", "[1, 1]", "negative"],
    ),
    "indices without a pool": (
        lambda: {"state_indices": torch.arange(2), "initial_state": None, "final_state": None}, ValueError,
        ["state_indices: expected initial_state or final_state with it"],
    ),
    "pools of different sizes": (
        lambda: {"state_indices": torch.arange(2), "initial_state": torch.zeros(3, H, K, K)}, ValueError,
        ["state_indices: expected pools of as many rows", "with 3", "with 2"],
    ),
    "a pool of other heads": (
        lambda: {"state_indices": torch.arange(2), "initial_state": torch.zeros(5, H + 1, K, K)}, ValueError,
        ["initial_state: expected a pool [rows, HV, V, K] = [rows, 3, 128, 128]", "[5, 4, 128, 128]"],
    ),
    "a pool of bf16 by indices at an odd address": (
        lambda: {"state_indices": torch.arange(2), "initial_state": odd_address((2, H, K, K), BF16)}, ValueError,
        ["initial_state", "multiple of 16 bytes"],
    ),
    "a pool of fp16": (
        lambda: {"state_indices": torch.arange(2), "final_state": torch.zeros(2, H, K, K).half()}, TypeError,
        ["final_state: expected float32 or bfloat16"],
    ),
    # states on the way
    "intermediate_states is True": (
        lambda: {"intermediate_states": True}, TypeError, ["intermediate_states: expected a torch.Tensor or None, got bool", "in place"],
    ),
    "intermediate_states of other heads": (
        lambda: {"intermediate_states": torch.zeros(2, H + 1, K, K)}, ValueError,
        ["intermediate_states: expected [rows, HV, V, K] = [rows, 3, 128, 128]", "[2, 4, 128, 128]"],
    ),
    "too few intermediate_states": (
        lambda: {"cu_seqlens_cpu": torch.tensor([0, 5, T]), "intermediate_states": torch.zeros(1, H, K, K)}, ValueError,
        ["at least sum of ceil(length / 64) = 2 rows", "[1, 3, 128, 128]"],
    ),
    "too few intermediate_states for a batch": (
        lambda: {
            "cu_seqlens": None, "initial_state": None, "final_state": None, "intermediate_states": torch.zeros(0, H, K, K),
        },
        ValueError, ["at least sum of ceil(length / 64) = 1 rows"],
    ),
    "intermediate_states are strided": (
        lambda: {"intermediate_states": torch.zeros(2, H, K, K).transpose(2, 3)}, ValueError,
        ["intermediate_states: expected a contiguous", "to write into"],
    ),
    "intermediate_states are fp64": (
        lambda: {"intermediate_states": torch.zeros(2, H, K, K).double()}, TypeError, ["intermediate_states: expected float32 or bfloat16"],
    ),
    "intermediate_states at an odd address": (
        lambda: {"intermediate_states": odd_address((2, H, K, K), torch.float32)}, ValueError, ["intermediate_states", "multiple of 16 bytes"],
    ),
    "checkpoints without offsets": (
        lambda: {"checkpoint_states": torch.zeros(2, H, K, K)}, ValueError, ["checkpoint_offsets: expected it together with checkpoint_states"],
    ),
    "offsets without checkpoints": (
        lambda: {"checkpoint_offsets": torch.zeros(2).int()}, ValueError, ["checkpoint_states: expected it together with checkpoint_offsets"],
    ),
    "three checkpoints a sequence": (
        lambda: {"checkpoint_states": torch.zeros(2, 3, H, K, K), "checkpoint_offsets": torch.zeros(2, 3).int()}, ValueError,
        ["checkpoint_states: expected [N, HV, V, K] = [2, 3, 128, 128] or [N, 2, HV, V, K]", "[2, 3, 3, 128, 128]"],
    ),
    "one offset for two checkpoints": (
        lambda: {"checkpoint_states": torch.zeros(2, 2, H, K, K), "checkpoint_offsets": torch.zeros(2).int()}, ValueError,
        ["checkpoint_offsets: expected [2, 2], got [2]"],
    ),
    # hints and scratch
    "cu_seqlens_cpu is a list": (
        lambda: {"cu_seqlens_cpu": [0, 5, T]}, TypeError, ["cu_seqlens_cpu: expected a torch.Tensor", "torch.tensor(cu_seqlens_cpu)"],
    ),
    "cu_seqlens_cpu alone": (
        lambda: {"cu_seqlens": None, "initial_state": None, "final_state": None, "cu_seqlens_cpu": torch.tensor([0, T])}, ValueError,
        ["cu_seqlens_cpu: expected cu_seqlens with it"],
    ),
    "cu_seqlens_cpu of another length": (
        lambda: {"cu_seqlens_cpu": torch.tensor([0, T])}, ValueError, ["cu_seqlens_cpu: expected the shape of cu_seqlens, [3], got [2]"],
    ),
    "cu_seqlens_cpu is a float": (
        lambda: {"cu_seqlens_cpu": torch.zeros(3)}, TypeError, ["cu_seqlens_cpu: expected int32 or int64"],
    ),
    "cu_seqlens_cpu is elsewhere": (
        lambda: {"cu_seqlens_cpu": torch.zeros(3).long().to("meta")}, ValueError, ["cu_seqlens_cpu: expected it on the CPU, got meta"],
    ),
    **{
        f"offsets {offsets}": (
            lambda offsets=offsets: {"cu_seqlens_cpu": torch.tensor(offsets)}, ValueError,
            ["cu_seqlens_cpu: expected offsets that rise from 0 or more to at most T = 12", str(offsets)],
        )
        for offsets in ([0, 7, 5], [-1, 5, 12], [0, 5, 13])
    },
    "workspace of floats": (lambda: {"workspace": torch.zeros(4)}, TypeError, ["workspace: expected uint8, got float32"]),
    "workspace at an odd address": (
        lambda: {"workspace": torch.zeros(33, dtype=torch.uint8)[1:]}, ValueError, ["workspace", "multiple of 16 bytes"],
    ),
    "workspace is strided": (
        lambda: {"workspace": torch.zeros(64, dtype=torch.uint8)[::2]}, ValueError, ["workspace: expected a contiguous"],
    ),
    # overlaps
    **{
        f"out is {name}": (lambda name=name: shared(name, "out"), ValueError, ["out: ", "overlaps " + name])
        for name in ("q", "k", "v", "g")
    },
    "out lies in beta": (lambda: shared("out", "beta"), ValueError, ["out: ", "overlaps beta"]),
    "out lies across v": (lambda: shared("v", "out", 2 * H * K), ValueError, ["out: ", "overlaps v"]),
    "out lies in A_log": (lambda: shared("out", "A_log"), ValueError, ["out: ", "overlaps A_log"]),
    "out lies in cu_seqlens": (lambda: shared("out", "cu_seqlens"), ValueError, ["out: ", "overlaps cu_seqlens"]),
    "out lies in initial_state": (lambda: shared("initial_state", "out"), ValueError, ["out: ", "overlaps initial_state"]),
    "out lies in final_state": (lambda: shared("final_state", "out"), ValueError, ["final_state: ", "overlaps out"]),
    "final_state lies over g": (lambda: shared("final_state", "g"), ValueError, ["final_state: ", "overlaps g"]),
    "final_state lies over dt_bias": (lambda: shared("final_state", "dt_bias"), ValueError, ["overlaps dt_bias"]),
    "final_state is half of initial_state": (
        lambda: shared("initial_state", "final_state", 64), ValueError, ["overlaps initial_state", "the very same tensor"],
    ),
    "final_state is initial_state read as another dtype": (
        lambda: (lambda s: {"initial_state": s, "final_state": s.view(BF16).view(-1)[: 2 * H * K * K].view(2, H, K, K)})(
            torch.zeros(2, H, K, K)
        ),
        ValueError, ["overlaps initial_state", "the very same tensor"],
    ),
    "checkpoints lie in out": (
        lambda: (lambda memory: {
            "out": memory.view(-1)[: B * T * H * K].view(B, T, H, K), "checkpoint_states": memory,
            "checkpoint_offsets": torch.zeros(2).int(),
        })(bf16(2, H, K, K)),
        ValueError, ["checkpoint_states: ", "overlaps out"],
    ),
    "intermediate states are the initial ones": (
        lambda: dict.fromkeys(("initial_state", "intermediate_states"), torch.zeros(2, H, K, K)), ValueError,
        ["intermediate_states: ", "overlaps initial_state"],
    ),
    "workspace lies in the checkpoints": (
        lambda: (lambda memory: {
            "workspace": memory, "checkpoint_states": memory.view(BF16).view(2, H, K, K), "checkpoint_offsets": torch.zeros(2).int(),
        })(torch.zeros(2 * 2 * H * K * K, dtype=torch.uint8)),
        ValueError, ["workspace: ", "overlaps checkpoint_states"],
    ),
    "the pool holds the indices": (
        lambda: (lambda pool: {"initial_state": pool, "final_state": pool, "state_indices": pool.view(-1).view(torch.int64)[:2]})(
            torch.tensor([0, 1] + [0] * (H * K * K - 2)).view(torch.float32).view(2, H, K, K)
        ),
        ValueError, ["final_state: ", "overlaps state_indices"],
    ),
    "final_state lies over the offsets of checkpoints": (
        lambda: (lambda state: {
            "final_state": state, "checkpoint_states": torch.zeros(2, H, K, K),
            "checkpoint_offsets": state.view(-1).view(torch.int32)[:2],
        })(torch.zeros(2, H, K, K)),
        ValueError, ["final_state: ", "overlaps checkpoint_offsets"],
    ),
    # gradients
    **{
        f"{name} requires a gradient": (
            lambda name=name: {name: arguments()[name].requires_grad_()}, RuntimeError,
            [f"{name} requires a gradient", "torch.no_grad()", f"{name}.detach()"],
        )
        for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "out", "final_state")
    },
    "intermediate_states require a gradient": (
        lambda: {"intermediate_states": torch.zeros(2, H, K, K).requires_grad_()}, RuntimeError, ["intermediate_states requires a gradient"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    change, kind, texts = REFUSED[name]
    call = arguments(**change())
    before = {n: x.detach().clone() for n, x in call.items() if isinstance(x, torch.Tensor) and x.device.type == "cpu"}
    with pytest.raises(kind) as caught:
        flash_kda.fwd(**call)
    assert type(caught.value) is kind
    message = str(caught.value)
    for text in texts:
        assert text in message, message
    assert "  " not in message
    assert not re.search(r"\bNone\.|\{|\}", message), f"unfilled: {message}"
    for n, x in before.items():
        assert torch.equal(x, call[n].detach()), f"{n} was written"


TENSORS = [name for name, value in arguments().items() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("name", TENSORS)
def test_a_freed_storage_is_refused(name: str) -> None:
    """A kernel would follow the address 0 and take the whole process's CUDA context with it."""
    call = arguments()
    call[name].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=f"^{name}: expected a tensor that holds memory, got a Tensor .* at address 0"):
        flash_kda.fwd(**call)


class Wrapper(torch.Tensor):
    """A tensor that keeps its data in another one, as distributed tensors do."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, strides=inner.stride())

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{function} ran")


@pytest.mark.parametrize("name", TENSORS)
def test_a_wrapper_without_memory_is_refused(name: str) -> None:
    call = arguments()
    call[name] = Wrapper(call[name])
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got a Wrapper .* pass {name}\.to_local\(\)"):
        flash_kda.fwd(**call)


@pytest.mark.filterwarnings("ignore:flash_kda.fwd was called with CPU tensors")
def test_tensors_without_elements_need_no_memory() -> None:
    rows = {name: bf16(B, 0, H, K) for name in ("q", "k", "v", "g", "out")}
    call = arguments(**rows, beta=bf16(B, 0, H), cu_seqlens=torch.zeros(3, dtype=torch.int32))
    _, state = flash_kda.fwd(**call)
    assert torch.equal(state, call["initial_state"])
    none = {name: call[name][:0] for name in ("initial_state", "final_state")}
    flash_kda.fwd(**{**call, **none, "cu_seqlens": torch.zeros(1, dtype=torch.int32)})


ACCEPTED: dict[str, Callable[[], dict[str, Any]]] = {
    "as it is": dict,
    "out=None": lambda: {"out": None},
    "no states": lambda: {"initial_state": None, "final_state": None},
    "bf16 states": lambda: {"initial_state": bf16(2, H, K, K), "final_state": bf16(2, H, K, K)},
    "int32 offsets": lambda: {"cu_seqlens": torch.tensor([0, 5, T], dtype=torch.int32)},
    "flat dt_bias": lambda: {"dt_bias": torch.zeros(H * K)},
    "int scale": lambda: {"scale": 1},
    "numpy numbers": lambda: {"scale": np.float32(0.1), "lower_bound": np.float64(-5)},
    "int lower_bound": lambda: {"lower_bound": -5},
    "strided beta": lambda: {"beta": bf16(B, H, T).transpose(1, 2)},
    "expanded inputs": lambda: {"q": bf16(B, T, 1, K).expand(B, T, H, K), "beta": bf16(B, 1, 1).expand(B, T, H)},
    "padded rows": lambda: {"k": columns(BF16, H * K + 8, 8), "out": columns(BF16, H * K + 8, 8)},
    "a stride that is never used": lambda: {"q": bf16(2 * T * H * K).as_strided((B, T, H, K), (3, H * K, K, 1))},
    "one tensor as q, k, v and g": lambda: dict.fromkeys(("q", "k", "v", "g"), bf16(B, T, H, K)),
    "rows of any width and address": lambda: {
        "q": columns(BF16, H * K + 1, 1),
        "k": columns(BF16, H * K + 4, 4),
        "g": columns(torch.float32, H * K + 3, 1),
        "out": columns(BF16, H * K + 5, 3),
    },
    "fp32 g and beta": lambda: {"g": bf16(B, T, H, K).float(), "beta": bf16(B, T, H).float()},
    "no A_log and dt_bias": lambda: {"A_log": None, "dt_bias": None},
    "no bound": lambda: {"lower_bound": None},
    "a log-decay": lambda: {
        "use_gate_in_kernel": False,
        "A_log": None,
        "dt_bias": None,
        "lower_bound": None,
        "g": bf16(B, T, H, K) - 1,
    },
    "all that is done inside turned off": lambda: {
        "use_qk_l2norm_in_kernel": False,
        "use_beta_sigmoid_in_kernel": False,
        "allow_neg_eigval": True,
    },
    "grouped value heads": lambda: {
        **{n: torch.full((B, T, 2 * H, K), 7.0, dtype=BF16) for n in ("v", "g", "out")},
        "beta": bf16(B, T, 2 * H),
        "A_log": torch.zeros(2 * H),
        "dt_bias": torch.zeros(2 * H, K),
        "initial_state": torch.zeros(2, 2 * H, K, K),
        "final_state": torch.zeros(2, 2 * H, K, K),
    },
    "K-first states": lambda: {"state_v_first": False},
    "a pool": lambda: {
        "state_indices": torch.tensor([4, 0]),
        **dict.fromkeys(("initial_state", "final_state"), torch.zeros(5, H, K, K)),
    },
    "a pool of wide rows and negative indices": lambda: {
        "state_indices": torch.tensor([-1, -1], dtype=torch.int32),
        **dict.fromkeys(("initial_state", "final_state"), torch.zeros(5, H * K * K + 4)[:, 4:].view(5, H, K, K)),
    },
    "states beside one another in a pool": lambda: dict(
        zip(("initial_state", "final_state"), torch.zeros(2, 2, H, K, K).unbind(1))
    ),
    "an index twice, only read": lambda: {"state_indices": torch.tensor([1, 1]), "final_state": None},
    "states on the way": lambda: {
        "intermediate_states": torch.zeros(2, H, K, K),
        "checkpoint_states": bf16(2, 2, H, K, K),
        "checkpoint_offsets": torch.tensor([[0, 16], [0, 0]]),
        "cu_seqlens_cpu": torch.tensor([0, 5, T], dtype=torch.int32),
    },
    "a workspace": lambda: {"workspace": torch.empty(64, dtype=torch.uint8)},
    "batch_invariant": lambda: {"batch_invariant": True},
    "one tensor as both states": lambda: dict.fromkeys(("initial_state", "final_state"), torch.zeros(2, H, K, K)),
    "slices of one buffer, out among them": lambda: {
        name: part.unflatten(-1, (H, K))
        for name, part in zip(("q", "out", "v"), torch.zeros(B, T, 3 * H * K, dtype=BF16).chunk(3, dim=-1))
    },
    "a row's tail as out": lambda: {
        "beta": (row := torch.zeros(B, T, 8 + H * K, dtype=BF16))[..., :H],
        "out": row[..., 8:].unflatten(-1, (H, K)),
    },
    "head-major slices of one buffer": lambda: {
        name: part.transpose(1, 2)
        for name, part in zip(("q", "out"), torch.zeros(B, 2 * H, T, K, dtype=BF16).chunk(2, dim=1))
    },
}


@pytest.mark.filterwarnings("ignore:flash_kda.fwd was called with CPU tensors")
@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name: str) -> None:
    call = arguments(**ACCEPTED[name]())
    out, state = flash_kda.fwd(**call)
    if call["out"] is not None:
        assert out is call["out"]
    assert state is call["final_state"]
    assert not bool((out == 7.0).all()), "out was not written"
    assert bool(out.isfinite().all())


@pytest.mark.filterwarnings("ignore:flash_kda.fwd was called with CPU tensors")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_are_ignored_where_none_are_recorded(mode: Any) -> None:
    call = arguments()
    for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"):
        call[name].requires_grad_()
    with mode():
        out, _ = flash_kda.fwd(**call)
    assert not out.requires_grad


def test_batched_slices_of_a_fused_buffer_with_out_among_them() -> None:
    """B > 1: ranges interleave across the batch as well."""
    fused = torch.zeros(2, T, 4 * H * K, dtype=BF16)
    parts = dict(zip(("q", "k", "out", "v"), (p.unflatten(-1, (H, K)) for p in fused.chunk(4, dim=-1))))
    from flash_kda.checks import OUT, check

    call = arguments(**parts, g=bf16(2, T, H, K), beta=bf16(2, T, H), cu_seqlens=None)
    taken = check(**call)
    assert taken[OUT] == parts["out"].data_ptr()
    assert taken[OUT + 6] == (T * 4 * H * K, 4 * H * K, K)
    reaching_into_k = fused.view(-1)[2 * H * K - 8 :].as_strided((2, T - 1, H, K), parts["out"].stride())
    shorter = {name: call[name][:, : T - 1] for name in ("q", "k", "v", "g", "beta")}
    with pytest.raises(ValueError, match=r"out: .* overlaps k"):
        check(**{**call, **shorter, "out": reaching_into_k})


@pytest.mark.parametrize(("T_total", "H", "N"), [(0, 0, 0), (8192, 96, 1), (10**9, 96, 256)])
def test_workspace_size(T_total: int, H: int, N: int) -> None:
    assert flash_kda.get_workspace_size(T_total, H, N) == 0
    assert flash_kda.get_workspace_size(T_total=T_total, H=H) == 0


@pytest.mark.parametrize("counts", [(-1, 1, 1), (1, -1, 1), (1, 1, -1)])
def test_workspace_size_refuses_negative_counts(counts: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least 0"):
        flash_kda.get_workspace_size(*counts)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(TypeError, match="safe_gate"):
        flash_kda.fwd(**arguments(), safe_gate=True)
    with pytest.raises(TypeError, match="positional"):
        flash_kda.fwd(*arguments().values(), True)


def test_a_workspace_that_is_too_small_is_refused() -> None:
    from flash_kda.checks import check_workspace

    check_workspace(torch.empty(64, dtype=torch.uint8), 64)
    with pytest.raises(ValueError, match="workspace: expected at least 65 bytes, got 64"):
        check_workspace(torch.empty(64, dtype=torch.uint8), 65)
