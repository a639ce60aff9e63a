"""A stand-in for the compiled module and for tensors on a GPU, so that the launch path runs on a machine without either.

``CudaLike`` is a CPU tensor that says it lies on cuda:1. ``FakeNative.forward`` gets what the real one gets (addresses, strides,
flags), reads and writes host memory through them, and computes with the reference: a wrong address, stride or flag shows.
"""

from __future__ import annotations

import ctypes
import json
from typing import Any

import torch

from flash_kda import reference

DEVICE = 1


class CudaLike(torch.Tensor):
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    device = property(lambda self: torch.device("cuda", DEVICE))  # type: ignore[assignment]

    def get_device(self) -> int:
        return DEVICE


def on_fake_gpu(tensor: Any) -> Any:
    return tensor.as_subclass(CudaLike) if isinstance(tensor, torch.Tensor) else tensor


def at(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    reach = sum((size - 1) * stride for size, stride in zip(shape, strides)) + 1
    memory = (ctypes.c_char * (reach * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


def dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


class FakeNative:
    CUBINS = (
        {"unit": "sm90", "arch": "90a", "sha256": "1" * 64, "size": 40000},
        {"unit": "portable", "arch": "90a", "sha256": "2" * 64, "size": 30000},
        {"unit": "portable", "arch": "120f", "sha256": "3" * 64, "size": 20000},
    )

    def __init__(
        self,
        *,
        driver: bool = True,
        gpus: tuple[tuple[str, int, int], ...] = (("NVIDIA H200", 9, 0),),
        cubins: Any = CUBINS,
    ) -> None:
        self.loads, self.gpus, self.cubins = driver, gpus, cubins
        self.calls: list[tuple[int, int]] = []
        self.asked: tuple[int, int, int, int, bool, bool] | None = None
        self.workspace_bytes = 0  # what a call needs
        self.workspaces: list[int] = []  # addresses that calls were handed

    def embedded(self) -> list[dict[str, Any]]:
        return [dict(cubin) for cubin in self.cubins]

    def build_record(self) -> str:
        return json.dumps({"version": "0.1.0", "cubins": self.embedded()})

    def driver(self) -> dict[str, Any]:
        if self.loads:
            return {"loaded": True, "version": 13000, "reason": ""}
        return {"loaded": False, "version": None, "reason": "libcuda.so.1: cannot open shared object file"}

    def device_count(self) -> int:
        return len(self.gpus) if self.loads else 0

    def device_info(self, index: int) -> dict[str, Any]:
        name, major, minor = self.gpus[index]
        return {
            "name": name, "major": major, "minor": minor, "sm_count": 132, "total_memory": 140 << 30,
            "shared_memory_per_block_optin": 232448,
        }  # fmt: skip

    def select(self, index: int) -> dict[str, Any]:
        name, major, minor = self.gpus[index]
        for cubin in self.cubins:
            if cubin["arch"][:-1] == f"{major}{minor}":
                return {**cubin, "kernel": f"{cubin['unit']}-wide"}
        raise RuntimeError(f"no code for {name} (compute capability {major}.{minor}) is embedded")

    def quick_setup(self, *torch: Any) -> bool:
        return False  # tensors that only say that they are on a GPU take the long way

    def segments(self, device: int, T: int, H: int, N: int, has_offsets: bool, whole: bool) -> int:
        self.asked = (device, T, H, N, has_offsets, whole)
        return 4 if self.workspace_bytes and not whole else 1

    def workspace_size(self, device: int, T: int, H: int, N: int, has_offsets: bool, whole: bool) -> int:
        self.asked = (device, T, H, N, has_offsets, whole)
        return self.workspace_bytes

    def forward(
        self,
        device: int, stream: int,
        q: int, k: int, v: int, g: int, beta: int, out: int,
        q_strides: Any, k_strides: Any, v_strides: Any, g_strides: Any, beta_strides: Any, out_strides: Any,
        B: int, T: int, H: int, HV: int, N: int, A_log: int, dt_bias: int,
        initial_state: int, initial_is_fp32: bool, initial_row: int, final_state: int, final_is_fp32: bool, final_row: int,
        cu_seqlens: int, cu_is_int64: bool, scale: float, lower_bound: float | None, g_is_fp32: bool, beta_is_fp32: bool,
        normalise: bool, gate: bool, sigmoid: bool, double: bool, v_first: bool, whole: bool,
        slots: Any, intermediate: Any, checkpoint: Any,
        workspace: int, workspace_bytes: int,
    ) -> None:  # fmt: skip
        assert workspace_bytes == self.workspace_bytes
        assert self.asked == (device, T, HV, N, cu_seqlens != 0, whole)
        assert (workspace != 0) == (workspace_bytes > 0)
        self.workspaces.append(workspace)
        for strides in (q_strides, k_strides, v_strides, g_strides, beta_strides, out_strides):
            assert type(strides) is tuple
            assert len(strides) == 3
        assert type(scale) is float
        assert lower_bound is None or type(lower_bound) is float
        self.calls.append((device, stream))

        def rows(address: int, heads: int, strides: tuple[int, ...], fp32: bool = False) -> torch.Tensor:
            return at(address, (B, T, heads, 128), (*strides, 1), torch.float32 if fp32 else torch.bfloat16)

        def states(address: int, shape: tuple[int, ...], fp32: bool, row: int | None = None) -> torch.Tensor | None:
            steps = dense(shape) if row is None else (row, *dense(shape[1:]))
            return at(address, shape, steps, torch.float32 if fp32 else torch.bfloat16) if address else None

        def integers(address: int, shape: tuple[int, ...], int64: bool) -> torch.Tensor:
            return at(address, shape, dense(shape), torch.int64 if int64 else torch.int32)

        one = (HV, 128, 128)
        count = slots[2] if slots else N
        marks = () if checkpoint is None or checkpoint[2] == 1 else (checkpoint[2],)
        reference.write_chunked(
            rows(out, HV, out_strides),
            reference.States(
                states(initial_state, (count, *one), initial_is_fp32, initial_row),
                states(final_state, (count, *one), final_is_fp32, final_row),
                v_first,
                integers(slots[0], (N,), slots[1]) if slots else None,
                states(intermediate[0], (intermediate[2], *one), intermediate[1]) if intermediate else None,
                states(checkpoint[0], (N, *marks, *one), checkpoint[1]) if checkpoint else None,
                integers(checkpoint[3], (N, *marks), checkpoint[4]) if checkpoint else None,
            ),
            rows(q, H, q_strides), rows(k, H, k_strides), rows(v, HV, v_strides), rows(g, HV, g_strides, g_is_fp32),
            at(beta, (B, T, HV), beta_strides, torch.float32 if beta_is_fp32 else torch.bfloat16), scale,
            at(A_log, (HV,), (1,), torch.float32) if A_log else None,
            at(dt_bias, (HV, 128), (128, 1), torch.float32) if dt_bias else None,
            lower_bound,
            integers(cu_seqlens, (N + 1,), cu_is_int64) if cu_seqlens else None,
            reference.Options(normalise, gate, sigmoid, double),
        )  # fmt: skip
