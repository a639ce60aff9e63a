"""Continuous batching of prefills over a pool of states: requests of any length share each step, and each keeps one row of the pool.

    python examples/serving_loop.py [--device cuda] [--budget 256]

A step takes some tokens of several requests, laid end to end (``cu_seqlens``), and names the row of the pool in which each
request's state lives (``state_indices``). States are read and written in place: nothing is gathered, scattered or copied. Rows are
given back when a request is done; a new request's row must be zeroed, since it holds what the last one left.

At the end each request's outputs are compared with those of one call over the whole prompt, bit for bit: pieces that are multiples
of 16 tokens, and ``batch_invariant=True``, make a request's result independent of how it was scheduled.
"""

from __future__ import annotations

import argparse
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

import flash_kda

HEAD_DIM = 128
CHUNK = 16  # tokens; a piece that ends at a multiple of it ends where the kernel ends a chunk anyway


@dataclass(eq=False)
class Request:
    """One prompt. ``rows`` holds q, k, v, g and beta of its tokens, as a model's projections would give them."""

    rows: dict[str, Tensor]
    done: int = 0  # tokens computed so far
    slot: int = -1  # row of the pool
    outputs: list[Tensor] = field(default_factory=list)

    @property
    def length(self) -> int:
        return int(self.rows["q"].shape[1])


class Engine:
    """Prefills requests, at most ``budget`` tokens a step and as many requests at once as the pool has rows."""

    def __init__(self, heads: int, slots: int, budget: int, device: str) -> None:
        self.pool = torch.zeros(slots, heads, HEAD_DIM, HEAD_DIM, device=device)  # [rows, H, V, K], fp32
        self.A_log = torch.rand(heads, device=device)
        self.dt_bias = torch.rand(heads, HEAD_DIM, device=device)
        self.free = list(range(slots))
        self.budget, self.device = budget, device
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def step(self) -> None:
        while self.waiting and self.free:
            request = self.waiting.popleft()
            request.slot = self.free.pop()
            self.pool[request.slot].zero_()
            self.running.append(request)
        batch, lengths = self._schedule()
        rows = {
            name: torch.cat([r.rows[name][:, r.done : r.done + n] for r, n in zip(batch, lengths)], 1)
            for name in ("q", "k", "v", "g", "beta")
        }
        out, _ = flash_kda.fwd(
            **rows, scale=HEAD_DIM**-0.5, out=None, A_log=self.A_log, dt_bias=self.dt_bias, lower_bound=-5.0,
            initial_state=self.pool, final_state=self.pool,
            cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(self.device),
            state_indices=torch.tensor([r.slot for r in batch], dtype=torch.int32, device=self.device),
            batch_invariant=True,
        )  # fmt: skip
        for request, piece in zip(batch, out.split(lengths, dim=1)):
            request.outputs.append(piece)
            request.done += piece.shape[1]
            if request.done == request.length:
                self.running.remove(request)
                self.free.append(request.slot)

    def _schedule(self) -> tuple[list[Request], list[int]]:
        """Who takes part in this step, with how many tokens: the longest waiting first, whole chunks but at a prompt's end."""
        batch, lengths, left = [], [], self.budget
        for request in self.running:
            rest = request.length - request.done
            tokens = rest if rest <= left else left // CHUNK * CHUNK
            if tokens:
                batch.append(request)
                lengths.append(tokens)
                left -= tokens
        return batch, lengths

    def one_shot(self, request: Request) -> Tensor:
        """The same request in one call of its own."""
        out, _ = flash_kda.fwd(
            **request.rows, scale=HEAD_DIM**-0.5, out=None, A_log=self.A_log, dt_bias=self.dt_bias, lower_bound=-5.0,
            batch_invariant=True,
        )  # fmt: skip
        return out


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budget", type=int, default=256, help="tokens a step")
    parser.add_argument("--slots", type=int, default=3)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="+", default=[300, 17, 128, 500, 1, 64, 233])
    options = parser.parse_args(arguments)
    if options.budget < CHUNK:
        parser.error(f"--budget: expected at least {CHUNK} tokens, got {options.budget}")

    torch.manual_seed(0)
    engine = Engine(options.heads, options.slots, options.budget, options.device)
    requests = []
    for length in options.lengths:
        heads = (1, length, options.heads)
        shapes = {
            "q": (*heads, HEAD_DIM),
            "k": (*heads, HEAD_DIM),
            "v": (*heads, HEAD_DIM),
            "g": (*heads, HEAD_DIM),
            "beta": heads,
        }
        requests.append(
            Request({n: torch.randn(*s, dtype=torch.bfloat16, device=options.device) for n, s in shapes.items()})
        )
    engine.waiting.extend(requests)
    steps = 0
    with torch.inference_mode():
        while engine.waiting or engine.running:
            engine.step()
            steps += 1
        different = [
            request.length
            for request in requests
            if not torch.equal(torch.cat(request.outputs, 1), engine.one_shot(request))
        ]
    print(
        f"{len(requests)} requests in {steps} steps of at most {options.budget} tokens; {len(different)} differ from one call each"
    )
    return len(different)


if __name__ == "__main__":
    raise SystemExit(main())
