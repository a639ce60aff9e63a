"""One path's process: checks and times the cases that it reads from stdin, and says each result in a line of JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks.paths import PATHS, Path
from flash_kda.bench import Shape, Timer, driver_version, make, measure, parse_lengths


def main(name: str) -> None:
    import torch

    path = PATHS[name]
    say({"about": about(path.version(), path.is_peer)})
    timer = Timer()
    for line in sys.stdin:
        try:
            row = answer(json.loads(line), path, timer)
        except Exception as error:  # of a peer, any kind; the other cases go on
            torch.cuda.synchronize()  # if the GPU is lost to this process, that ends it, and the rest goes on in another
            text = " ".join(str(error).split())[:300]
            say({"failure": f"{type(error).__name__}: {text}"})
        else:
            say({"row": row})


def answer(case: dict[str, Any], path: Path, timer: Timer) -> dict[str, Any]:
    import torch

    shape, state = Shape(parse_lengths(case["seq_lens"]), case["heads"]), case["state"]
    inputs = make(shape, case["regime"], state)
    with torch.inference_mode():
        return measure(path.prepare(inputs), shape, state, inputs, timer, case["floor_bandwidth"])


def about(version: str, is_peer: bool) -> dict[str, Any]:
    """What ran: GPU and versions, and the machine code of one of our kernels."""
    import torch

    from flash_kda import device_code

    found: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(0),
        "driver": driver_version(),
        "torch": torch.__version__,
        "version": version,
    }
    if not is_peer:
        _, cubin, reason = device_code.choose(0)
        if cubin is None:
            raise RuntimeError(reason)
        found["cubin"] = {"unit": cubin.unit, "arch": cubin.arch, "sha256": cubin.sha256}
    return found


def say(message: dict[str, Any]) -> None:
    # Peers print too; what is ours is marked.
    print(f"@{json.dumps(message)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
