"""Problems, guarded runs and comparisons: everything the GPU tests share, for any device.

The bodies here take the device as an argument, and the CPU tests run them on small problems, so that nothing in them is run
for the first time on a GPU.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import record
import torch
from torch import Tensor

import flash_kda
from flash_kda import reference

BF16, FP32 = torch.bfloat16, torch.float32
K = 128

# Mean of the raw gate, with unit variance. "strong" is the usual benchmark input (a state is forgotten within 16 tokens); the
# weak ones are what trained models have in many channels (a state lives for thousands of tokens).
STRONG, WEAK, WEAKEST = 0.0, -7.0, -12.0
LIMIT = {STRONG: 6e-3, WEAK: 8e-3, WEAKEST: 8e-3}
EQUAL_KEYS_LIMIT = 1e-2
REGIME = {STRONG: "strong", WEAK: "weak", WEAKEST: "weakest"}

MIXED_LENGTHS = [1300, 547, 2048, 963, 271, 3063]
EMPTY_LENGTHS = [0, 1, 0, 17, 0]


@dataclasses.dataclass
class Problem:
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor
    dt_bias: Tensor
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None
    scale: float = K**-0.5
    lower_bound: float = -5.0

    @property
    def N(self) -> int:
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.numel() - 1

    @property
    def H(self) -> int:
        return self.q.shape[2]

    def replace(self, **changes: Any) -> Problem:
        return dataclasses.replace(self, **changes)

    def heads(self, chosen: list[int]) -> Problem:
        """The same problem with only these heads (heads do not mix)."""
        bias = self.dt_bias.view(self.H, K)[chosen]
        state = None if self.initial_state is None else self.initial_state[:, chosen]
        rows = {name: getattr(self, name)[:, :, chosen] for name in ("q", "k", "v", "g", "beta")}
        return self.replace(**rows, A_log=self.A_log[chosen], dt_bias=bias, initial_state=state)


def make(
    device: str,
    lengths: list[int] | None = None,
    H: int = 2,
    gate: float = STRONG,
    *,
    batch: tuple[int, int] | None = None,
    initial: torch.dtype | None = None,
    offsets: torch.dtype = torch.int64,
    slack: int = 0,
    seed: int = 0,
) -> Problem:
    """A random problem: either sequences of these lengths end to end, or a batch of (B, T).

    ``slack`` tokens at the end belong to no sequence.
    """
    generator = torch.Generator(device).manual_seed(seed)
    B, T = batch if lengths is None else (1, sum(lengths) + slack)  # type: ignore[misc]

    def normal(*shape: int, mean: float = 0.0) -> Tensor:
        return torch.empty(shape, dtype=BF16, device=device).normal_(mean, 1.0, generator=generator)

    problem = Problem(
        q=normal(B, T, H, K),
        k=normal(B, T, H, K),
        v=normal(B, T, H, K),
        g=normal(B, T, H, K, mean=gate),
        beta=normal(B, T, H),
        A_log=torch.rand(H, device=device, generator=generator),
        dt_bias=torch.rand(H, K, device=device, generator=generator),
    )
    if lengths is not None and (len(lengths) > 1 or slack):
        problem.cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=offsets)
    if initial is not None:
        problem.initial_state = torch.empty(problem.N, H, K, K, device=device).normal_(generator=generator).to(initial)
    return problem


class Guarded:
    """A NaN-filled tensor inside a larger buffer, whose margins must survive."""

    MARGIN = 4096  # elements before and after
    MARK = 7.0

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
        count = math.prod(shape)
        self.buffer = torch.full((count + 2 * self.MARGIN,), self.MARK, dtype=dtype, device=device)
        self.tensor = self.buffer[self.MARGIN : self.MARGIN + count].view(shape)
        self.tensor.fill_(math.nan)

    def check_margins(self, what: str) -> None:
        margins = torch.cat([self.buffer[: self.MARGIN], self.buffer[-self.MARGIN :]])
        assert bool((margins == self.MARK).all()), f"{what}: written outside of its memory"


def run(problem: Problem, final: torch.dtype | None = FP32) -> tuple[Tensor, Tensor | None]:
    """One call into poisoned, guarded results: what must be written is finite afterwards, nothing else was touched."""
    device = str(problem.q.device)
    out = Guarded(tuple(problem.q.shape), BF16, device)
    state = None if final is None else Guarded((problem.N, problem.H, K, K), final, device)
    got_out, got_state = call(problem, out.tensor, None if state is None else state.tensor)
    assert got_out is out.tensor
    assert got_state is (None if state is None else state.tensor)
    out.check_margins("out")
    inside = rows_in_sequences(problem)
    assert bool(out.tensor[inside].isfinite().all()), "out: a row of a sequence was not written, or is not finite"
    assert bool(out.tensor[~inside].isnan().all()), "out: a row that belongs to no sequence was written"
    if state is not None:
        state.check_margins("final_state")
        assert bool(state.tensor.isfinite().all()), "final_state: not fully written, or not finite"
    return got_out, got_state


def call(problem: Problem, out: Tensor | None, final_state: Tensor | None) -> tuple[Tensor, Tensor | None]:
    p = problem
    if p.q.is_cuda:
        record.used_kernel(p.q.get_device())
    return flash_kda.fwd(
        p.q,
        p.k,
        p.v,
        p.g,
        p.beta,
        p.scale,
        out,
        p.A_log,
        p.dt_bias,
        p.lower_bound,
        p.initial_state,
        final_state,
        p.cu_seqlens,
    )


def median_microseconds(problem: Problem, warm_up: int, samples: int) -> float:
    """CUDA-event median of a call with an fp32 final state."""
    out, state = torch.empty_like(problem.q), torch.empty_like(problem.initial_state)

    def once() -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(200_000)  # 0.1 ms: the launch is queued before the first event is reached
        begin.record()
        call(problem, out, state)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    for _ in range(warm_up):
        once()
    return statistics.median(once() for _ in range(samples))


def rows_in_sequences(problem: Problem) -> Tensor:
    """bool [B, T]: rows that some sequence owns."""
    B, T = problem.q.shape[:2]
    if problem.cu_seqlens is None:
        return torch.ones(B, T, dtype=torch.bool, device=problem.q.device)
    inside = torch.zeros(1, T, dtype=torch.bool, device=problem.q.device)
    offsets = problem.cu_seqlens.clamp(0, T).tolist()
    for begin, end in zip(offsets[:-1], offsets[1:]):
        inside[0, begin:end] = True
    return inside


def oracle(problem: Problem, kind: str = "chunked") -> tuple[Tensor, Tensor]:
    p = problem
    function = {"chunked": reference.chunked, "recurrent": reference.recurrent}[kind]
    return function(
        p.q, p.k, p.v, p.g, p.beta, p.scale, p.A_log, p.dt_bias, p.lower_bound, p.initial_state, p.cu_seqlens
    )


def distance(got: Tensor, expected: Tensor) -> float:
    """||got - expected|| / ||expected||, in fp64; 0 for two empty tensors."""
    norm = expected.double().norm().item()
    gap = (got.double() - expected.double()).norm().item()
    return gap / norm if norm else gap


def check_against_oracle(
    name: str, problem: Problem, limit: float, final: torch.dtype | None = FP32, kind: str = "chunked"
) -> None:
    """Run, compare with fp64, record the errors under ``name``, and hold both to ``limit``."""
    out, state = run(problem, final)
    expected_out, expected_state = oracle(problem, kind)
    inside = rows_in_sequences(problem)
    errors = {"out": distance(out[inside], expected_out[inside])}
    if state is not None:
        errors["state"] = distance(state, expected_state)
    if problem.q.is_cuda:
        record.error(name, **errors)
    for what, value in errors.items():
        assert value <= limit, f"{name}: relative error of {what} is {value:.2e}, more than {limit:.0e}"


FRESH_PROCESS = """
import sys
sys.path[:0] = {path!r}
import threading
import torch, flash_kda
import kda_cases as cases
problem = cases.make({device!r}, [100, 0, 37], 3, cases.WEAK, initial=cases.FP32)
out, state = torch.empty_like(problem.q), torch.empty_like(problem.initial_state)

def first_call():
    p = problem
    flash_kda.fwd(p.q, p.k, p.v, p.g, p.beta, p.scale, out, p.A_log, p.dt_bias, p.lower_bound, p.initial_state, state,
                  p.cu_seqlens)

{body}
first = out.clone()
again, _ = cases.run(problem)
cases.check_same(first, again, "out of the first call")
assert cases.distance(first, cases.oracle(problem)[0]) <= cases.LIMIT[cases.WEAK]
print("right")
"""


def fresh_process(device: str, body: str) -> str:
    """Run ``body``, which makes the first call of a new process, and check its result; what the process printed."""
    path = [str(Path(__file__).resolve().parent), *(entry for entry in sys.path if entry)]
    program = FRESH_PROCESS.format(path=path, device=device, body=textwrap.dedent(body))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def equal_keys(device: str, T: int, H: int) -> Problem:
    """One random key for all tokens, almost no decay, beta near 1: what makes a series inverse diverge."""
    problem = make(device, [T], H, seed=11)
    problem.k[:] = problem.k[:, :1].clone()
    problem.g.fill_(-12.0)
    problem.beta.fill_(8.0)
    return problem


def extremes(device: str, T: int = 70) -> dict[str, Problem]:
    """Finite inputs near the ends of their ranges."""
    largest = torch.finfo(BF16).max
    problems: dict[str, Problem] = {}

    def add(name: str, gate: float = STRONG, **factors: float) -> Problem:
        problem = make(device, [T, 1, 33], 2, gate, initial=FP32, seed=len(problems))
        for field, factor in factors.items():
            getattr(problem, field).mul_(factor)
        problems[name] = problem
        return problem

    for gate in (STRONG, WEAKEST):
        label = REGIME[gate]
        add(f"{label}, huge q and k", gate, q=1e18, k=1e18)
        add(f"{label}, tiny q and k", gate, q=1e-30, k=1e-30)
        add(f"{label}, huge v", gate, v=1e30)
        add(f"{label}, tiny v", gate, v=1e-38)
        add(f"{label}, huge state", gate, initial_state=1e30)
        add(f"{label}, huge beta", gate, beta=1e30)
    for name, factor in (("largest", 1.0), ("zero", 0.0)):
        problem = add(f"{name} q and k")
        for x in (problem.q, problem.k):
            x.copy_(torch.where(x > 0, factor * largest, -factor * largest))
    for name, value in (("fully open", largest), ("fully shut", -largest)):
        add(f"gate {name}").g.fill_(value)
        add(f"beta {name}").beta.fill_(value)
    problem = add("exp(A_log) overflows fp32, at the middle of the gate")
    problem.A_log.fill_(100.0)
    problem.g.zero_()
    problem.dt_bias.zero_()
    problem = add("lower_bound near zero")
    problem.lower_bound = -1e-30
    return problems


def fused_slices(device: str, problem: Problem) -> tuple[Problem, Tensor]:
    """The same problem with q, k, v, g and beta as slices of one projection [B, T, width], and that projection."""
    B, T, H, _ = problem.q.shape
    width = 4 * H * K + 8 * math.ceil(H / 8)
    fused = torch.full((B, T, width), math.nan, dtype=BF16, device=device)
    slices = {}
    for i, name in enumerate(("q", "k", "v", "g")):
        part = fused[:, :, i * H * K : (i + 1) * H * K].unflatten(-1, (H, K))
        slices[name] = part.copy_(getattr(problem, name))
    slices["beta"] = fused[:, :, 4 * H * K : 4 * H * K + H].copy_(problem.beta)
    return problem.replace(**slices), fused


def check_same(a: Tensor, b: Tensor, what: str) -> None:
    """Equal, bit for bit."""
    assert torch.equal(
        a.view(torch.int16 if a.dtype is BF16 else torch.int32), b.view(torch.int16 if b.dtype is BF16 else torch.int32)
    ), f"{what}: not equal bit for bit"


def check_fused_slices(device: str, T: int, H: int) -> None:
    """Slices of a fused projection, and an ``out`` inside a wider buffer, give what dense tensors give, bit for bit."""
    problem = make(device, None, H, WEAK, batch=(2, T), initial=FP32, seed=3)
    expected_out, expected_state = run(problem)
    sliced, fused = fused_slices(device, problem)
    assert not any(getattr(sliced, name).is_contiguous() for name in ("q", "k", "v", "g", "beta"))
    before = fused.clone()
    wide = torch.full((2, T, 3 * H * K), 7.0, dtype=BF16, device=device)
    out = wide[:, :, H * K : 2 * H * K].unflatten(-1, (H, K))
    state = torch.full((2, H, K, K), math.nan, device=device)
    call(sliced, out, state)
    assert expected_state is not None
    check_same(out.contiguous(), expected_out, "out of strided slices")
    check_same(state, expected_state, "state of strided slices")
    beside = torch.cat([wide[:, :, : H * K], wide[:, :, 2 * H * K :]], -1)
    assert bool((beside == 7.0).all()), "written beside out"
    assert torch.equal(fused.nan_to_num(0.0), before.nan_to_num(0.0)), "the inputs were changed"


def check_layouts(device: str) -> None:
    """Head-major memory, rows of a padded buffer and expanded inputs: read in place, same bits as dense copies."""
    problem = make(device, [50], 4, WEAK, seed=4)
    head_major = problem.replace(
        **{n: getattr(problem, n).transpose(1, 2).contiguous().transpose(1, 2) for n in "qkvg"}
    )
    expanded = problem.replace(
        q=problem.q[:, :, :1].expand(-1, -1, 4, -1),
        g=problem.g[:, :1].expand(-1, 50, -1, -1),
        beta=problem.beta[:, :, :1].expand(-1, -1, 4),
    )
    beta_columns = problem.replace(beta=problem.beta.transpose(1, 2).contiguous().transpose(1, 2))
    for name, strided in (("head-major", head_major), ("expanded", expanded), ("beta head-major", beta_columns)):
        dense = strided.replace(**{n: getattr(strided, n).contiguous() for n in ("q", "k", "v", "g", "beta")})
        assert any(not getattr(strided, n).is_contiguous() for n in ("q", "k", "v", "g", "beta"))
        out, state = run(strided)
        expected_out, expected_state = run(dense)
        assert state is not None
        assert expected_state is not None
        check_same(out, expected_out, f"out, {name}")
        check_same(state, expected_state, f"state, {name}")


def check_empty_calls(device: str) -> None:
    """No tokens, no sequences, or no batch: states pass through, and nothing fails."""
    for initial in (None, FP32, BF16):
        for final in (FP32, BF16):
            no_tokens = make(device, None, 3, batch=(2, 0), initial=initial)
            all_empty = make(device, [0, 0, 0], 3, initial=initial)
            for problem in (no_tokens, all_empty):
                _, state = run(problem, final)
                assert state is not None
                expected = torch.zeros_like(state) if problem.initial_state is None else problem.initial_state.to(final)
                check_same(state, expected, f"state through an empty call, {initial} to {final}")
    no_sequences = make(device, [5], 3).replace(cu_seqlens=torch.zeros(1, dtype=torch.int32, device=device))
    run(no_sequences)
    run(make(device, None, 3, batch=(0, 8), initial=FP32))
    run(make(device, None, 0, batch=(1, 8), initial=FP32))


def check_state_in_place(device: str) -> None:
    """initial_state and final_state may be one tensor; the result is that of separate ones."""
    for dtype in (FP32, BF16):
        problem = make(device, [40, 0, 23], 2, WEAK, initial=dtype, seed=5)
        out, state = run(problem, dtype)
        assert problem.initial_state is not None
        assert state is not None
        shared = problem.initial_state.clone()
        again, got = call(problem.replace(initial_state=shared), None, shared)
        assert got is shared
        check_same(again, out, "out with the state in place")
        check_same(shared, state, "state in place")


def check_odd_offsets(device: str) -> None:
    """Offsets outside [0, T] are clamped; a sequence that ends before it begins is empty."""
    problem = make(device, [128], 2, WEAK, seed=6)
    offsets = [50, 20, 45, 400, -3, 2]  # empty, [20, 45), [45, 128), empty, [0, 2)
    for dtype in (torch.int32, torch.int64):
        odd = problem.replace(cu_seqlens=torch.tensor(offsets, dtype=dtype, device=device))
        odd.initial_state = torch.ones(5, 2, K, K, device=device)
        out, state = run(odd)
        expected_out, expected_state = oracle(odd, "recurrent")
        inside = rows_in_sequences(odd)
        assert int(inside.sum()) == 2 + 25 + 83
        assert state is not None
        assert distance(out[inside], expected_out[inside]) <= LIMIT[WEAK]
        assert distance(state, expected_state) <= LIMIT[WEAK]


def check_split_call(device: str, T: int, cuts: list[int]) -> None:
    """One sequence in several calls that hand the fp32 state on is as accurate as one call."""
    problem = make(device, [T], 2, WEAK, seed=7)
    expected_out, expected_state = oracle(problem)
    state: Tensor | None = None
    outs = []
    for begin, end in zip([0, *cuts], [*cuts, T]):
        part = problem.replace(
            **{n: getattr(problem, n)[:, begin:end] for n in ("q", "k", "v", "g", "beta")}, initial_state=state
        )
        out, state = run(part)
        outs.append(out)
    assert state is not None
    assert distance(torch.cat(outs, 1), expected_out) <= LIMIT[WEAK]
    assert distance(state, expected_state) <= LIMIT[WEAK]


def check_offset_dtypes(device: str) -> None:
    """int32 and int64 offsets give the same bits."""
    wide = make(device, [33, 0, 64, 5], 2, WEAK, offsets=torch.int64)
    assert wide.cu_seqlens is not None
    out, state = run(wide)
    narrow_out, narrow_state = run(wide.replace(cu_seqlens=wide.cu_seqlens.int()))
    assert state is not None
    assert narrow_state is not None
    check_same(narrow_out, out, "out")
    check_same(narrow_state, state, "state")
