"""``python -m flash_kda bench``: how quick the kernels are on this GPU, beside FLA's and the floor that its memory sets.

Each kernel runs in a process of its own, since a GPU keeps the kernel of its first call. Needs torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Callable

import flash_kda
from flash_kda import bench, device_code

SHAPES = ("8192:96", "8x1024:96", "1300,547,2048,963,271,3063:64", "8192:16", "65536:8", "1024:16")
KERNELS = ("sm90", "portable-wide", "portable-narrow")
FLA = "FLA"

Say = Callable[[str], None]


def examine(shapes: Sequence[bench.Shape], say: Say) -> dict[str, Any]:
    """Times of every kernel that this GPU can run, and of FLA if it is installed, as plain JSON values.

    ``say`` is told of each result as it comes.
    """
    import torch

    preferred = device_code.choose(0).kernel
    report: dict[str, Any] = {
        "flash_kda": flash_kda.__version__,
        "gpu": torch.cuda.get_device_name(0),
        "driver": bench.driver_version(),
        "torch": torch.__version__,
        "preferred": preferred,
        "copy_bytes_per_second": round(bench.copy_bandwidth(bench.Timer())),
        "cubins": {},
        "rows": [],
        "not_run": {},
    }
    torch.cuda.empty_cache()  # the other processes may need the memory
    say(f"{report['gpu']}, copies {report['copy_bytes_per_second'] / 1e12:.2f} TB/s")
    paths = sorted(KERNELS, key=lambda name: name != preferred)
    if find_spec("fla") is None:
        report["not_run"][FLA] = "flash-linear-attention is not installed"
    else:
        paths.append(FLA)
    for path in paths:
        for message in _child(path, shapes, report["copy_bytes_per_second"]):
            if "row" in message:
                row = {"path": path, **message["row"]}
                report["rows"].append(row)
                result = f"{row['median_us']:.1f} us" if "median_us" in row else f"FAILED: {row['failure']}"
                say(f"{path}: {row['seq_lens']} tokens, {row['heads']} heads, {row['regime']}: {result}")
            elif "cubin" in message:
                report["cubins"][path] = message["cubin"]
            else:
                report["not_run"][path] = message["not_run"]
    return report


def _child(path: str, shapes: Sequence[bench.Shape], bandwidth: float) -> Iterator[dict[str, Any]]:
    environment = {**os.environ, "FLA_FLASH_KDA": "0"}
    if path != FLA:
        environment["FLASH_KDA_KERNEL"] = path
    texts = [f"{shape.seq_lens}:{shape.heads}" for shape in shapes]
    command = [sys.executable, "-c", f"from {__name__} import child; child()", path, str(bandwidth), *texts]
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("@"):  # others print too
                    yield json.loads(line[1:])
        if process.returncode != 0:
            errors.seek(0)
            said = errors.read().split("\n")
            yield {"not_run": f"its process ended: {next(filter(None, reversed(said)), process.returncode)}"}


def child() -> None:
    """The process of one path: a line of JSON for each thing to report."""
    import torch

    path, bandwidth, *texts = sys.argv[1:]

    def say(message: Mapping[str, Any]) -> None:
        print(f"@{json.dumps(message)}", flush=True)

    if path != FLA:
        kernel, cubin, reason = device_code.choose(0)
        if kernel != path or cubin is None:
            say({"not_run": reason})
            return
        say({"cubin": cubin._asdict()})
    timer = bench.Timer()
    for shape in map(bench.parse_shape, texts):
        for regime in bench.REGIMES:
            row: dict[str, Any] = {"seq_lens": shape.seq_lens, "heads": shape.heads, "regime": regime, "state": "fp32"}
            try:
                with torch.inference_mode():
                    inputs = bench.make(shape, regime, "fp32")
                    call = bench.fla_call(inputs) if path == FLA else bench.our_call(inputs)
                    row |= bench.measure(call, shape, "fp32", inputs, timer, float(bandwidth))
            except Exception as error:  # of FLA, any kind: its other shapes go on
                torch.cuda.synchronize()  # ends this process if the GPU is lost to it
                row["failure"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            say({"row": row})


def describe(report: Mapping[str, Any]) -> Iterator[str]:
    """The report as a table of text: one row a shape and gate, one column a path."""
    yield f"flash_kda {report['flash_kda']} on {report['gpu']}, driver {report['driver']}, torch {report['torch']}"
    yield f"a copy within its memory: {report['copy_bytes_per_second'] / 1e12:.2f} TB/s, read and written"
    for path, cubin in report["cubins"].items():
        preferred = ", which calls use here" if path == report["preferred"] else ""
        yield f"{path}: {cubin['unit']} {cubin['arch']}, sha256 {cubin['sha256']}{preferred}"
    yield ""
    yield "microseconds, medians; fp32 states in and out; error: of outputs, relative to fp64, of the first column"
    paths = list(dict.fromkeys(row["path"] for row in report["rows"]))
    width = max([len(row["seq_lens"]) for row in report["rows"]] + [6])
    yield (
        f"{'tokens':{width}}  heads  gate    "
        + "".join(f"{name:>17}" for name in paths)
        + "     floor  x floor    error"
    )
    rows: dict[tuple[str, int, str], dict[str, Mapping[str, Any]]] = {}
    for row in report["rows"]:
        rows.setdefault((row["seq_lens"], row["heads"], row["regime"]), {})[row["path"]] = row
    for (seq_lens, heads, regime), found in rows.items():
        times = [f"{found[name]['median_us']:.1f}" if "median_us" in found.get(name, {}) else "-" for name in paths]
        line = f"{seq_lens:{width}}  {heads:>5}  {regime:8}" + "".join(f"{text:>17}" for text in times)
        first = found.get(paths[0], {})
        if "median_us" in first:
            ratio = first["median_us"] / first["floor_us"]
            line += f"{first['floor_us']:>10.1f}{ratio:>9.2f}{first['err_out']:>9.1e}"
        yield line
    for row in report["rows"]:
        if "failure" in row:
            yield f"{row['path']}, {row['seq_lens']} tokens, {row['heads']} heads, {row['regime']}: FAILED: {row['failure']}"
    for path, reason in report["not_run"].items():
        yield f"{path}: not run: {reason}"


def is_good(report: Mapping[str, Any]) -> bool:
    """Whether the kernel that calls use here gave right results throughout."""
    rows = [row for row in report["rows"] if row["path"] == report["preferred"]]
    return bool(rows) and not any("failure" in row for row in rows)
