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

import pytest
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
EQUAL_KEYS_LIMIT = FORM_LIMIT = 1e-2
REGIME = {STRONG: "strong", WEAK: "weak", WEAKEST: "weakest"}

ROWS = ("q", "k", "v", "g", "beta")  # what has a row for each token

MIXED_LENGTHS = [1300, 547, 2048, 963, 271, 3063]
EMPTY_LENGTHS = [0, 1, 0, 17, 0]


@dataclasses.dataclass
class Problem:
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None
    scale: float = K**-0.5
    lower_bound: float | None = -5.0
    options: dict[str, bool] = dataclasses.field(default_factory=dict)  # those that the oracle has too

    @property
    def N(self) -> int:
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.numel() - 1

    @property
    def H(self) -> int:
        """Value heads: those of states and outputs."""
        return self.v.shape[2]

    def replace(self, **changes: Any) -> Problem:
        return dataclasses.replace(self, **changes)

    def heads(self, chosen: list[int]) -> Problem:
        """The same problem with only these value heads (heads do not mix)."""
        group = self.H // self.q.shape[2]
        rows = {name: getattr(self, name)[:, :, chosen] for name in ("v", "g", "beta")}
        keys = {name: getattr(self, name)[:, :, [head // group for head in chosen]] for name in ("q", "k")}
        return self.replace(
            **rows,
            **keys,
            A_log=None if self.A_log is None else self.A_log[chosen],
            dt_bias=None if self.dt_bias is None else self.dt_bias.view(self.H, K)[chosen],
            initial_state=None if self.initial_state is None else self.initial_state[:, chosen],
        )

    def part(self, begin: int, end: int) -> Problem:
        """Tokens [begin, end) of every row of the batch, without the initial state."""
        rows = {name: getattr(self, name)[:, begin:end] for name in ROWS}
        return self.replace(**rows, initial_state=None, cu_seqlens=None)


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
    group: int = 1,
) -> Problem:
    """A random problem: either sequences of these lengths end to end, or a batch of (B, T).

    ``slack`` tokens at the end belong to no sequence. ``H`` counts value heads, of which ``group`` share a query and a key.
    """
    generator = torch.Generator(device).manual_seed(seed)
    B, T = batch if lengths is None else (1, sum(lengths) + slack)  # type: ignore[misc]

    def normal(*shape: int, mean: float = 0.0) -> Tensor:
        return torch.empty(shape, dtype=BF16, device=device).normal_(mean, 1.0, generator=generator)

    problem = Problem(
        q=normal(B, T, H // group, K),
        k=normal(B, T, H // group, K),
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


def run(problem: Problem, final: torch.dtype | None = FP32, **extras: Any) -> tuple[Tensor, Tensor | None]:
    """One call into poisoned, guarded results: what must be written is finite afterwards, nothing else was touched."""
    device = str(problem.q.device)
    out = Guarded(tuple(problem.v.shape), BF16, device)
    state = None if final is None else Guarded((problem.N, problem.H, K, K), final, device)
    got_out, got_state = call(problem, out.tensor, None if state is None else state.tensor, **extras)
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


def call(
    problem: Problem, out: Tensor | None, final_state: Tensor | None, **extras: Any
) -> tuple[Tensor, Tensor | None]:
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
        **p.options,
        **extras,
    )


def workspace_of(problem: Problem) -> Tensor:
    """As large as a call of the problem takes; nobody has written to it."""
    B, T = problem.q.shape[:2]
    size = flash_kda.get_workspace_size(B * T, problem.H, problem.N)
    return torch.empty(max(size, 16), dtype=torch.uint8, device=problem.q.device)


def median_microseconds(problem: Problem, warm_up: int, samples: int) -> float:
    """CUDA-event median of a call with an fp32 final state."""
    out, state = torch.empty_like(problem.v), torch.empty_like(problem.initial_state)

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


def microseconds_by_split(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Medians of a call whose sequences are cut where that pays ("auto"), and never ("0")."""
    times = {}
    for setting in ("auto", "0"):
        monkeypatch.setenv("FLASH_KDA_SPLIT", setting)
        times[setting] = median_microseconds(problem, warm_up=3, samples=9)
    return times


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
        p.q,
        p.k,
        p.v,
        p.g,
        p.beta,
        p.scale,
        p.A_log,
        p.dt_bias,
        p.lower_bound,
        p.initial_state,
        p.cu_seqlens,
        **p.options,
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


def log_decays(problem: Problem) -> Tensor:
    """fp32, natural: what the bounded gate makes of the problem's g."""
    assert problem.A_log is not None
    assert problem.dt_bias is not None
    assert problem.lower_bound is not None
    raw = problem.A_log.exp().view(-1, 1) * (problem.g.float() + problem.dt_bias.view(-1, K))
    return problem.lower_bound * raw.sigmoid()


def without_gate(problem: Problem, decays: Tensor) -> Problem:
    """The problem with natural-log decays in place of a gate."""
    options = {**problem.options, "use_gate_in_kernel": False}
    return problem.replace(g=decays, A_log=None, dt_bias=None, lower_bound=None, options=options)


def forms(device: str, lengths: list[int], H: int = 4) -> dict[str, Problem]:
    """Every form of gate, beta, q, k and heads but the usual one, alone and several together."""
    generator = torch.Generator(device).manual_seed(1)
    problems: dict[str, Problem] = {}

    def plain(gate: float = WEAK, group: int = 1) -> Problem:
        return make(device, lengths, H, gate, initial=FP32, seed=20 + len(problems), group=group)

    def options(problem: Problem, **more: bool) -> Problem:
        return problem.replace(options={**problem.options, **more})

    def normalised(problem: Problem) -> Problem:
        q, k = (torch.nn.functional.normalize(x.float(), dim=-1).bfloat16() for x in (problem.q, problem.k))
        return options(problem.replace(q=q, k=k), use_qk_l2norm_in_kernel=False)

    def spread(like: Tensor, low: float, high: float) -> Tensor:
        """exp of what is uniform: all magnitudes alike."""
        return torch.empty(like.shape, device=device).uniform_(low, high, generator=generator).exp()

    for gate in (STRONG, WEAK, WEAKEST):
        problems[f"no bound, {REGIME[gate]}"] = plain(gate).replace(lower_bound=None)
    problem = plain().replace(lower_bound=None)
    problems["no bound, down to -1000 a token"] = problem.replace(
        g=(spread(problem.g, 0, 5.9) - 30).bfloat16(), A_log=torch.ones_like(problem.A_log)
    )
    problem = plain(WEAK).replace(lower_bound=None)
    problem.g[..., 5::16] = 300.0  # one channel of each block
    problem.g[:, 3::7] = 300.0  # and some tokens
    problems["no bound, some tokens and channels forget all"] = problem
    problem = plain().replace(lower_bound=None)
    problem.g.fill_(1000.0)
    problems["no bound, everything is forgotten"] = problem
    problems["no bound, no A_log, no dt_bias, fp32 g"] = (
        plain(STRONG).replace(lower_bound=None, A_log=None, dt_bias=None).replace(g=plain(STRONG).g.float())
    )

    for gate in (STRONG, WEAKEST):
        problem = plain(gate)
        problems[f"log-decay, {REGIME[gate]}"] = without_gate(problem, log_decays(problem))
    problem = plain()
    problems["log-decay in bf16"] = without_gate(problem, log_decays(problem).bfloat16())
    problem = plain()
    problems["log-decay, all magnitudes to -1000"] = without_gate(problem, -spread(problem.g, -9, 6.9))
    problem = plain()
    decays = -spread(problem.g, -9, -5)
    decays[:, 1::2] = -1000.0
    problems["log-decay, every second token forgets all"] = without_gate(problem, decays)
    problem = plain()
    decays = -spread(problem.g, -9, -5)
    decays[:, 2::16] = torch.finfo(FP32).min
    problems["log-decay, the lowest number"] = without_gate(problem, decays)
    problem = equal_keys(device, sum(lengths), H)
    problems["log-decay of nothing, equal keys"] = without_gate(problem, torch.zeros_like(problem.g))
    problem = plain()
    problems["log-decay above 0"] = without_gate(problem, spread(problem.g, -2, 3).bfloat16())

    for gate in (STRONG, WEAK):
        problem = plain(gate)
        problems[f"fp32 g, {REGIME[gate]}"] = problem.replace(g=problem.g + 0.01 * spread(problem.g, -2, 0))
    problems["no A_log"] = plain(STRONG).replace(A_log=None)
    problems["no dt_bias"] = plain(STRONG).replace(dt_bias=None)
    problem = plain()
    problems["fp32 beta"] = problem.replace(beta=problem.beta.float() + 0.001)
    problem = plain()
    problems["activated beta"] = options(
        problem.replace(beta=problem.beta.float().sigmoid()), use_beta_sigmoid_in_kernel=False
    )
    problems["doubled beta"] = options(plain(), allow_neg_eigval=True)
    problem = plain(WEAKEST)
    problems["activated bf16 beta, doubled"] = options(
        problem.replace(beta=problem.beta.sigmoid()), use_beta_sigmoid_in_kernel=False, allow_neg_eigval=True
    )
    for gate in (STRONG, WEAK):
        problems[f"normalised q and k, {REGIME[gate]}"] = normalised(plain(gate))
    for group in (2, 4):
        problems[f"{group} value heads a key head"] = plain(group=group)
    problem = normalised(plain(group=2))
    problems["all together"] = options(
        without_gate(
            problem.replace(beta=problem.beta.float().sigmoid()), log_decays(problem) * spread(problem.g, -1, 4)
        ),
        use_beta_sigmoid_in_kernel=False,
        allow_neg_eigval=True,
    )
    return problems


def random_form(device: str, seed: int) -> Problem:
    """Any combination of gate, dtypes, heads, activations and layout."""
    generator = torch.Generator().manual_seed(seed)

    def pick(*values: Any) -> Any:
        return values[int(torch.randint(len(values), (), generator=generator))]

    group = pick(1, 1, 2, 3)
    lengths = [int(x) for x in torch.randint(0, 200, (pick(1, 2, 5),), generator=generator)]
    gate = pick(STRONG, WEAK, WEAKEST)
    problem = make(
        device,
        lengths,
        group * pick(1, 2),
        gate,
        initial=pick(None, FP32, BF16),
        slack=pick(0, 3),
        seed=seed,
        group=group,
    )
    kind = pick("bounded", "unbounded", "log-decay")
    if kind == "log-decay":
        problem = without_gate(problem, pick(0.01, 1.0, 300.0) * log_decays(problem))
    else:
        if kind == "unbounded":
            problem.lower_bound = None
            problem.g.mul_(pick(1.0, 100.0))
        problem.A_log = pick(problem.A_log, None)
        problem.dt_bias = pick(problem.dt_bias, None)
    problem.g, problem.beta = problem.g.to(pick(FP32, BF16)), problem.beta.to(pick(FP32, BF16))
    if pick(True, False):
        problem.options["use_beta_sigmoid_in_kernel"] = False
        problem.beta = problem.beta.sigmoid()
    if pick(True, False):
        problem.options["use_qk_l2norm_in_kernel"] = False
        problem.q, problem.k = (
            torch.nn.functional.normalize(x.float(), dim=-1).bfloat16() for x in (problem.q, problem.k)
        )
    problem.options["allow_neg_eigval"] = pick(True, False)
    if group == 1 and problem.g.dtype is BF16 and problem.beta.dtype is BF16:
        problem, _ = fused_slices(device, problem, pick(None, 6, 12), pick(0, 1))
    return problem


def fused_slices(device: str, problem: Problem, spare: int | None = None, shift: int = 0) -> tuple[Problem, Tensor]:
    """The same problem with q, k, v, g and beta as slices of one projection [B, T, width], and that projection.

    ``spare``: columns beside those of q, k, v, g; by default such that the width is a multiple of 8. ``shift``: the column that the
    first slice begins with.
    """
    B, T, H, _ = problem.q.shape
    width = 4 * H * K + (8 * math.ceil(H / 8) if spare is None else spare)
    fused = torch.full((B, T, width), math.nan, dtype=BF16, device=device)
    slices = {}
    for i, name in enumerate(("q", "k", "v", "g")):
        part = fused[:, :, shift + i * H * K : shift + (i + 1) * H * K].unflatten(-1, (H, K))
        slices[name] = part.copy_(getattr(problem, name))
    first = shift + 4 * H * K
    slices["beta"] = fused[:, :, first : first + H].copy_(problem.beta)
    return problem.replace(**slices), fused


def check_same(a: Tensor, b: Tensor, what: str) -> None:
    """Equal, bit for bit."""
    assert torch.equal(
        a.view(torch.int16 if a.dtype is BF16 else torch.int32), b.view(torch.int16 if b.dtype is BF16 else torch.int32)
    ), f"{what}: not equal bit for bit"


def check_fused_slices(device: str, T: int, H: int, spare: int | None = None, shift: int = 0) -> None:
    """Slices of a fused projection, and an ``out`` inside a wider buffer, give what dense tensors give, bit for bit."""
    problem = make(device, None, H, WEAK, batch=(2, T), initial=FP32, seed=3)
    expected_out, expected_state = run(problem)
    sliced, fused = fused_slices(device, problem, spare, shift)
    assert not any(getattr(sliced, name).is_contiguous() for name in ("q", "k", "v", "g", "beta"))
    before = fused.clone()
    margin = H * K + shift
    wide = torch.full((2, T, 2 * margin + H * K + (spare or 0) % 8), 7.0, dtype=BF16, device=device)
    out = wide[:, :, margin : margin + H * K].unflatten(-1, (H, K))
    state = torch.full((2, H, K, K), math.nan, device=device)
    call(sliced, out, state)
    assert expected_state is not None
    check_same(out.contiguous(), expected_out, "out of strided slices")
    check_same(state, expected_state, "state of strided slices")
    beside = torch.cat([wide[:, :, :margin], wide[:, :, margin + H * K :]], -1)
    assert bool((beside == 7.0).all()), "written beside out"
    assert torch.equal(fused.nan_to_num(0.0), before.nan_to_num(0.0)), "the inputs were changed"


def check_mixed_layouts(device: str) -> None:
    """Each of q, k, v, g, out alone at an odd place, the others not: same bits; and an fp32 g at odd strides."""
    problem = make(device, [37, 0, 20], 3, WEAK, initial=FP32, seed=8)
    expected_out, expected_state = run(problem)
    assert expected_state is not None

    def moved(tensor: Tensor, shift: int, spare: int) -> Tensor:
        B, T, H, _ = tensor.shape
        wide = torch.full((B, T, H * K + shift + spare), math.nan, dtype=tensor.dtype, device=device)
        return wide[:, :, shift : shift + H * K].unflatten(-1, (H, K)).copy_(tensor)

    for shift, spare in ((1, 0), (4, 8), (8, 4), (0, 3)):
        for name in ("q", "k", "v", "g"):
            out, state = run(problem.replace(**{name: moved(getattr(problem, name), shift, spare)}))
            assert state is not None
            check_same(out, expected_out, f"out, {name} shifted by {shift}, {spare} to spare")
            check_same(state, expected_state, f"state, {name} shifted by {shift}, {spare} to spare")
        out = moved(torch.full_like(problem.v, 7.0), shift, spare)
        call(problem, out, None)
        check_same(out.contiguous(), expected_out, f"out itself shifted by {shift}, {spare} to spare")
        wide = problem.replace(g=problem.g.float())
        out, state = run(wide)
        again, again_state = run(wide.replace(g=moved(wide.g, shift, spare)))
        assert state is not None
        assert again_state is not None
        check_same(again, out, f"out, fp32 g shifted by {shift}, {spare} to spare")
        check_same(again_state, state, f"state, fp32 g shifted by {shift}, {spare} to spare")


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


# ---- states: their forms, and those saved on the way


def check_alike(got: Tensor, expected: Tensor, what: str) -> None:
    """Equal bit for bit on a GPU; on the CPU, where sums may be ordered by shape, up to rounding."""
    if got.is_cuda:
        check_same(got.contiguous(), expected.contiguous(), what)
    else:
        assert bool(got.isfinite().all()), what
        assert distance(got, expected) <= (1e-6 if got.dtype is FP32 else 4e-3), what


def check_key_first_states(device: str) -> None:
    """[..., K, V] gives the transpose of [..., V, K]."""
    for dtype in (FP32, BF16):
        problem = make(device, [40, 0, 23], 2, WEAK, initial=dtype, seed=5)
        out, state = run(problem, dtype)
        assert problem.initial_state is not None
        assert state is not None
        turned = problem.replace(initial_state=problem.initial_state.transpose(-1, -2).contiguous())
        again, again_state = run(turned, dtype, state_v_first=False)
        assert again_state is not None
        check_same(again, out, "out, K first")
        check_same(again_state.transpose(-1, -2).contiguous(), state, "state, K first")


def check_pools(device: str) -> None:
    """Rows of a pool, chosen by index, read and written in place; all other rows stay as they were."""
    lengths = [40, 0, 23, 64, 5]
    H, rows, chosen = 2, 9, [7, 0, -1, 4, 9]  # the third has no row, nor has the last: the pool ends at row 8
    owners = [0, 1, 3]
    problem = make(device, lengths, H, WEAK, seed=9)
    for dtype in (FP32, BF16):
        # A pool inside wider rows, as one that holds other things of a sequence too.
        wide = torch.full((rows, H * K * K + 24), 7.0, dtype=dtype, device=device)
        pool = wide[:, 16 : 16 + H * K * K].unflatten(1, (H, K, K))
        pool.normal_(generator=torch.Generator(device).manual_seed(2))
        initial = torch.zeros(len(lengths), H, K, K, dtype=dtype, device=device)
        initial[owners] = pool[[chosen[n] for n in owners]]
        expected_out, expected_state = run(problem.replace(initial_state=initial), dtype)
        assert expected_state is not None
        for v_first in (True, False):
            for integers in (torch.int32, torch.int64):
                indices = torch.tensor(chosen, dtype=integers, device=device)
                before = wide.clone()
                expected = wide.clone()
                target = expected[:, 16 : 16 + H * K * K].unflatten(1, (H, K, K))
                for n in owners:
                    target[chosen[n]] = expected_state[n]
                work = wide.clone()
                states = work[:, 16 : 16 + H * K * K].unflatten(1, (H, K, K))
                if not v_first:
                    states.copy_(states.transpose(-1, -2).contiguous())
                out, _ = call(
                    problem.replace(initial_state=states), None, states, state_indices=indices, state_v_first=v_first
                )
                if not v_first:
                    states.copy_(states.transpose(-1, -2).contiguous())
                what = f"{dtype}, {integers}, V first {v_first}"
                check_same(out, expected_out, f"out with a pool, {what}")
                check_alike(work, expected, f"the pool, {what}")
                untouched = [row for row in range(rows) if row not in chosen]
                check_same(work[untouched], before[untouched], f"rows of other sequences, {what}")
    # Read from one pool, written into another of another dtype; and only read.
    source = torch.randn(4, H, K, K, device=device)
    target = torch.full((4, H, K, K), 7.0, dtype=BF16, device=device)
    indices = torch.tensor([3, -1, 0, 1, -5], device=device)
    initial = torch.zeros(len(lengths), H, K, K, device=device)
    initial[[0, 2, 3]] = source[[3, 0, 1]]
    expected_out, expected_state = run(problem.replace(initial_state=initial), BF16)
    assert expected_state is not None
    out, _ = call(problem.replace(initial_state=source), None, target, state_indices=indices)
    check_same(out, expected_out, "out, from one pool into another")
    check_alike(target[[3, 0, 1]], expected_state[[0, 2, 3]], "rows of the other pool")
    assert bool((target[2] == 7.0).all())
    out, _ = call(problem.replace(initial_state=source), None, None, state_indices=indices)
    check_same(out, expected_out, "out, from a pool that is only read")


def state_after(problem: Problem, sequence: int, tokens: int, final: torch.dtype) -> Tensor:
    """State [H, V, K] of one sequence after so many of its tokens, by a call on nothing else."""
    begin = sum_before(problem, sequence)
    alone = problem.part(begin, begin + tokens)
    if problem.cu_seqlens is None:
        alone = alone.replace(**{name: getattr(problem, name)[sequence : sequence + 1, :tokens] for name in ROWS})
    if problem.initial_state is not None:
        alone = alone.replace(initial_state=problem.initial_state[sequence : sequence + 1])
    _, state = run(alone, final, batch_invariant=True)
    assert state is not None
    return state[0]


def sum_before(problem: Problem, sequence: int) -> int:
    return 0 if problem.cu_seqlens is None else int(problem.cu_seqlens[sequence])


def check_saved_states(device: str, problem: Problem, lengths: list[int], every: int = 1) -> None:
    """States at every 64 tokens and at offsets are the final states of the prefixes, and nothing else is written.

    ``every``: of as many states at 64 tokens one is compared.
    """
    H, N = problem.H, len(lengths)
    expected_out, expected_state = run(problem, batch_invariant=True)
    assert expected_state is not None
    # An offset in the middle, at the end if that is a multiple of 16, none, too far, and no multiple.
    offsets = [[min(16 * (1 + n), length) // 16 * 16, length // 16 * 16] for n, length in enumerate(lengths)]
    offsets[0] = [16, lengths[0] + 16]
    offsets[1] = [24, 0]
    for dtype, v_first, several in ((FP32, True, True), (BF16, True, False), (FP32, False, False), (BF16, False, True)):
        counts = [-(-length // 64) for length in lengths]
        snapshots = torch.full((sum(counts) + 2, H, K, K), 7.0, dtype=dtype, device=device)
        marks = torch.full((N, 2, H, K, K) if several else (N, H, K, K), 7.0, dtype=dtype, device=device)
        places = torch.tensor(offsets, device=device, dtype=torch.int32 if v_first else torch.int64)
        initial = problem.initial_state
        if initial is not None and not v_first:
            initial = initial.transpose(-1, -2).contiguous()
        out, state = run(
            problem.replace(initial_state=initial), state_v_first=v_first, intermediate_states=snapshots,
            checkpoint_states=marks, checkpoint_offsets=places if several else places[:, 0].contiguous(),
        )  # fmt: skip
        assert state is not None
        if not v_first:
            state, snapshots, marks = (x.transpose(-1, -2).contiguous() for x in (state, snapshots, marks))
        check_alike(out, expected_out, "out of a call that saves states")
        check_alike(state, expected_state, "final state of a call that saves states")
        row = 0
        for n, length in enumerate(lengths):
            for tokens in range(0, length, 64):
                if row % every == 0:
                    expected = state_after(problem, n, tokens, dtype)
                    check_alike(snapshots[row], expected, f"sequence {n} before token {tokens}")
                row += 1
            for j in range(2 if several else 1):
                saved, offset = marks[n, j] if several else marks[n], offsets[n][j]
                if offset % 16 == 0 and 0 < offset <= length:
                    check_alike(saved, state_after(problem, n, offset, dtype), f"sequence {n} after {offset} tokens")
                else:
                    assert bool((saved == 7.0).all()), f"sequence {n}: written at offset {offset} of {length} tokens"
        assert bool((snapshots[row:] == 7.0).all()), "rows beyond the intermediate states were written"
        if v_first and problem.cu_seqlens is not None:
            few = torch.full((row // 2, H, K, K), 7.0, dtype=dtype, device=device)
            run(problem, intermediate_states=few)
            check_alike(few, snapshots[: row // 2], "as many intermediate states as fit")


def check_all_saved_states(device: str) -> None:
    lengths = [70, 30, 0, 64, 129, 1, 48]
    check_saved_states(device, make(device, lengths, 2, WEAK, initial=FP32, offsets=torch.int32, seed=10), lengths)
    check_saved_states(device, make(device, None, 2, WEAK, batch=(2, 80), seed=11), [80, 80])


def check_workspace(device: str) -> None:
    """A workspace that is larger than needed, of a call that needs one or none, changes nothing."""
    problem = make(device, None, 2, WEAK, batch=(1, 1500), initial=FP32, seed=12)
    expected_out, expected_state = run(problem)
    size = flash_kda.get_workspace_size(1500, 2)
    assert (size > 0) == problem.q.is_cuda
    workspace = torch.full((size + 4096,), 7, dtype=torch.uint8, device=device)
    out, state = run(problem, workspace=workspace)
    assert state is not None
    assert expected_state is not None
    check_same(out, expected_out, "out with a workspace of the caller's")
    check_same(state, expected_state, "state with a workspace of the caller's")
    assert bool((workspace[size:] == 7).all()), "written behind the workspace"
