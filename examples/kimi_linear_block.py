"""Chunked prefill of a Kimi Linear attention block: a prompt in pieces, with carried state, gives what one pass over it gives.

    python examples/kimi_linear_block.py [--device cuda] [--tokens 1000] [--piece 256] [--fla]

Between two calls a KDA layer carries two things: the recurrent state ``[B, H, V, K]``, and the last few inputs of its short
convolutions. Both live in a dict here. With random weights, in bf16; on a CPU, ``flash_kda.fwd`` runs its plain-torch reference.

``--fla`` takes flash-linear-attention's own layer instead (needs a GPU, flash-linear-attention and transformers), with
``flash_kda.fla.register()``: its ``chunk_kda`` then runs here too, with the unbounded gate that is the layer's default.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import flash_kda

HEAD_DIM = 128


class ShortConvolution(nn.Module):
    """Causal depthwise convolution over the tokens, then SiLU; the last inputs are carried from call to call."""

    def __init__(self, channels: int, width: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, 1, width) * width**-0.5)

    def forward(self, x: Tensor, carried: Tensor | None) -> tuple[Tensor, Tensor]:
        """x ``[B, T, channels]``; carried ``[B, width - 1, channels]``, None at the start of a sequence."""
        missing = self.weight.shape[2] - 1
        x = F.pad(x, (0, 0, missing, 0)) if carried is None else torch.cat([carried, x], 1)
        y = F.conv1d(x.transpose(1, 2), self.weight, groups=x.shape[2])
        return F.silu(y).transpose(1, 2).contiguous(), x[:, x.shape[1] - missing :]


class KimiDeltaAttention(nn.Module):
    """The KDA layer of Kimi Linear (arXiv 2510.26692, figure 3)."""

    def __init__(self, hidden: int, heads: int, lower_bound: float | None = -5.0) -> None:
        super().__init__()
        width = heads * HEAD_DIM
        self.heads, self.lower_bound = heads, lower_bound
        self.qkv = nn.Linear(hidden, 3 * width, bias=False)
        self.convolution = ShortConvolution(3 * width)
        self.decay = nn.Sequential(nn.Linear(hidden, HEAD_DIM, bias=False), nn.Linear(HEAD_DIM, width, bias=False))
        self.beta = nn.Linear(hidden, heads, bias=False)
        self.output_gate = nn.Sequential(nn.Linear(hidden, HEAD_DIM, bias=False), nn.Linear(HEAD_DIM, width))
        self.norm = nn.RMSNorm(HEAD_DIM, eps=1e-5)
        self.output = nn.Linear(width, hidden, bias=False)
        # These two stay in fp32, and so does the recurrent state.
        self.register_buffer("A_log", torch.empty(heads).uniform_(1, 16).log())
        self.register_buffer("dt_bias", torch.randn(heads, HEAD_DIM) - 6)

    def forward(self, x: Tensor, cache: dict[str, Any]) -> Tensor:
        """x ``[B, T, hidden]``, the next tokens of each sequence; cache: empty at their start, renewed by each call."""
        mixed, cache["convolution"] = self.convolution(self.qkv(x), cache.get("convolution"))
        q, k, v = mixed.unflatten(-1, (3, self.heads, HEAD_DIM)).unbind(2)  # slices, read in place
        state = cache.get("state")
        if state is None:
            state = torch.zeros(x.shape[0], self.heads, HEAD_DIM, HEAD_DIM, dtype=torch.float32, device=x.device)
        out, cache["state"] = flash_kda.fwd(
            q, k, v, self.decay(x).unflatten(-1, (self.heads, HEAD_DIM)), self.beta(x), HEAD_DIM**-0.5, None,
            self.A_log, self.dt_bias, self.lower_bound, initial_state=state, final_state=state,
        )  # fmt: skip
        gate = torch.sigmoid(self.output_gate(x)).unflatten(-1, (self.heads, HEAD_DIM))
        return self.output((self.norm(out) * gate).flatten(-2))


class FlaCache:
    """The part of a cache that FLA's layers use."""

    def __init__(self) -> None:
        self.layers: list[dict[str, Any]] = []

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.layers[index]

    def update(self, layer_idx: int, **state: Any) -> None:
        self.layers[layer_idx : layer_idx + 1] = [state]


class FlaLayer(nn.Module):
    """FLA's layer, called as the one above."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        from fla.layers import KimiDeltaAttention as Layer

        flash_kda.fla.register()
        self.layer = Layer(hidden_size=hidden, num_heads=heads, head_dim=HEAD_DIM, layer_idx=0)

    def forward(self, x: Tensor, cache: dict[str, Any]) -> Tensor:
        out, _, _ = self.layer(x, past_key_values=cache.setdefault("fla", FlaCache()), use_cache=True)
        return out


def prefill(block: nn.Module, x: Tensor, piece: int) -> Tensor:
    """The block over x ``[B, T, hidden]``, ``piece`` tokens at a time."""
    cache: dict[str, Any] = {}
    return torch.cat([block(part, cache) for part in x.split(piece, dim=1)], 1)


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--piece", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--fla", action="store_true")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    layer = FlaLayer if options.fla else KimiDeltaAttention
    block = layer(options.hidden, options.heads).eval().to(options.device)
    for name, parameter in block.named_parameters():
        if not name.endswith(("A_log", "dt_bias")):
            parameter.data = parameter.data.to(torch.bfloat16)
    x = torch.randn(2, options.tokens, options.hidden, dtype=torch.bfloat16, device=options.device)
    with torch.inference_mode():
        whole = prefill(block, x, options.tokens)
        pieces = prefill(block, x, options.piece)
    difference = float((pieces - whole).float().norm() / whole.float().norm())
    print(f"{options.tokens} tokens at once and {options.piece} at a time differ by {difference:.1e}, relatively")
    if options.fla:
        print(f"chunk_kda: {dict(flash_kda.fla.counts)}")
    return difference


if __name__ == "__main__":
    main()
