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
        self.asked: tuple[int, int, int, int, bool] | None = None
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

    def workspace_size(self, device: int, T: int, H: int, N: int, has_offsets: bool) -> int:
        self.asked = (device, T, H, N, has_offsets)
        return self.workspace_bytes

    def forward(
        self,
        device: int, stream: int,
        q: int, k: int, v: int, g: int, beta: int, out: int,
        q_strides: Any, k_strides: Any, v_strides: Any, g_strides: Any, beta_strides: Any, out_strides: Any,
        B: int, T: int, H: int, N: int,
        A_log: int, dt_bias: int, initial_state: int, initial_is_fp32: bool, final_state: int, final_is_fp32: bool,
        cu_seqlens: int, cu_is_int64: bool, scale: float, lower_bound: float,
        workspace: int, workspace_bytes: int,
    ) -> None:  # fmt: skip
        assert workspace_bytes == self.workspace_bytes
        assert (workspace != 0) == (workspace_bytes > 0)
        self.workspaces.append(workspace)
        assert self.asked == (device, T, H, N, cu_seqlens != 0)
        for strides in (q_strides, k_strides, v_strides, g_strides, beta_strides, out_strides):
            assert type(strides) is tuple
            assert len(strides) == 3
        assert type(scale) is float
        assert type(lower_bound) is float
        self.calls.append((device, stream))
        rows = (B, T, H, 128)

        def row_tensor(address: int, strides: tuple[int, ...]) -> torch.Tensor:
            return at(address, rows, (*strides, 1), torch.bfloat16)

        def state(address: int, is_fp32: bool) -> torch.Tensor | None:
            shape = (N, H, 128, 128)
            return at(address, shape, dense(shape), torch.float32 if is_fp32 else torch.bfloat16) if address else None

        offsets = at(cu_seqlens, (N + 1,), (1,), torch.int64 if cu_is_int64 else torch.int32) if cu_seqlens else None
        reference.write_chunked(
            row_tensor(out, out_strides), state(final_state, final_is_fp32),
            row_tensor(q, q_strides), row_tensor(k, k_strides), row_tensor(v, v_strides), row_tensor(g, g_strides),
            at(beta, (B, T, H), beta_strides, torch.bfloat16),
            scale, at(A_log, (H,), (1,), torch.float32), at(dt_bias, (H, 128), (128, 1), torch.float32), lower_bound,
            state(initial_state, initial_is_fp32), offsets,
        )  # fmt: skip
