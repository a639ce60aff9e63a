"""``python -m flash_kda``: look at this installation.

doctor    What is installed, which kernel this machine uses and why, and a self-check. Exit code:
          0 good: a GPU kernel runs and is right
          1 broken: the module does not load, carries no machine code, or the self-check fails
          3 in order, but no kernel can run here: CPU reference only
          4 in order, but torch is missing: nothing was run
archs     The machine code in this installation.
verify    What wheels are, out of the files alone: the machine code in them against device-code.lock, their tags against
          their symbols, their needs against their metadata. Exit code: 0 fit, 1 not fit or not readable
bench     Times of the kernels on this GPU, each result checked first, beside flash-linear-attention's (if installed) and the
          floor that memory sets; half a minute, progress on stderr. Exit code: as doctor's
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from flash_kda import device_code, doctor, verify


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flash_kda", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="doctor | archs | verify | bench")
    for name in ("doctor", "archs"):
        command = commands.add_parser(name)
        command.add_argument("--json", action="store_true", help="print JSON")
    command = commands.add_parser("verify")
    command.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL")
    command.add_argument(
        "--lock",
        type=Path,
        help="compare machine code with this file (default: device-code.lock of this folder, if there)",
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command = commands.add_parser(
        "bench",
        description="Check the kernels on this GPU against fp64, and time them, in both gate regimes (raw gate ~ N(0, 1) and N(-7, 1)).",
        epilog="examples:\n  python -m flash_kda bench\n  python -m flash_kda bench --shapes 8192:96 8191,64x1:16 --json > mine.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "--shapes",
        nargs="+",
        metavar="LENGTHS:HEADS",
        help="such as 8192:96, or 8191,64x1:16 (64 sequences of one token)",
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    if options.command == "bench":
        return _bench(options.shapes, options.json)
    if options.command == "verify":
        return _verify(options.wheels, options.lock, options.json)
    return _doctor(options.json) if options.command == "doctor" else _archs(options.json)


def _doctor(as_json: bool) -> int:
    report = doctor.examine()
    _say(json.dumps(report, indent=1) if as_json else "\n".join(doctor.describe(report)))
    return int(report["exit_code"])


def _archs(as_json: bool) -> int:
    try:
        cubins = device_code.embedded()
        record = device_code.build_record()
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return doctor.BROKEN
    if as_json:
        _say(json.dumps({"cubins": [cubin._asdict() for cubin in cubins], "build": record}, indent=1))
        return doctor.GOOD
    _say(
        "\n".join(
            f"{cubin.unit:<10}{cubin.arch:<6}for compute capability {device_code.serves(cubin.arch):<20}{cubin.size:>8} bytes\n"
            f"          sha256 {cubin.sha256}"
            for cubin in cubins
        )
    )
    return doctor.GOOD


def _verify(wheels: Sequence[Path], lock: Path | None, as_json: bool) -> int:
    here = Path("device-code.lock")
    try:
        reports = [verify.verify(wheel, lock or (here if here.is_file() else None)) for wheel in wheels]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if as_json:
        _say(
            json.dumps(
                [{**report._asdict(), "code": [code._asdict() for code in report.code]} for report in reports], indent=1
            )
        )
    else:
        _say("\n\n".join("\n".join(verify.describe(report)) for report in reports))
    return 1 if any(report.faults for report in reports) else 0


def _bench(shapes: Sequence[str] | None, as_json: bool) -> int:
    try:
        import torch

        from flash_kda import bench, self_benchmark
    except ImportError as error:
        print(f"bench needs torch >= 2.4: {error}", file=sys.stderr)
        return doctor.NO_TORCH
    try:
        wanted = [bench.parse_shape(text) for text in shapes or self_benchmark.SHAPES]
        device_code.native()
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, ValueError) else doctor.BROKEN  # 2: as argparse says of a wrong command line
    choice = device_code.choose(0)
    if choice.cubin is None or not torch.cuda.is_available():
        print(f"bench needs a GPU: {choice.reason if choice.cubin is None else 'torch sees none'}", file=sys.stderr)
        return doctor.REFERENCE_ONLY
    report = self_benchmark.examine(wanted, lambda text: print(text, file=sys.stderr, flush=True))
    _say(json.dumps(report, indent=1) if as_json else "\n".join(self_benchmark.describe(report)))
    return doctor.GOOD if self_benchmark.is_good(report) else doctor.BROKEN


def _say(text: str) -> None:
    """Print so that the exit code stays the verdict: whatever the terminal can spell, and though the reader may have left."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except BrokenPipeError:
        # Python flushes once more at its exit; nobody reads that either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
