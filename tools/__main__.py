"""python3 -m tools: everything a developer or a user does with this tree, on a bare Python."""

import argparse
import shutil
import sys
from pathlib import Path

from tools import ROOT, build, device
from tools.archs import allowed, plan
from tools.errors import BuildError, explain, os_error_text
from tools.toolchain import DEVICE, obtain
from tools.units import UNIT_BY_NAME, Unit


def command_cubins(arguments: argparse.Namespace) -> None:
    """Compile device code alone."""
    chosen = plan(arguments.arch)
    toolchain = obtain((DEVICE,), log)
    jobs = []
    if arguments.source:
        source = Path(arguments.source).resolve()
        unit = Unit(source.stem, source.name, chosen.archs)
        jobs = [device.Job(unit, arch, source.parent, tuple(arguments.option), arguments.lineinfo) for arch in chosen.archs]
    else:
        for unit, arch in chosen.jobs():
            if not arguments.unit or unit.name in arguments.unit:
                jobs.append(device.Job(unit, arch, options=tuple(arguments.option), lineinfo=arguments.lineinfo))
    if not jobs:
        raise BuildError("nothing to compile: no unit has these architectures")
    cubins = device.build(jobs, toolchain, build.device_store(), log, allow_spills=arguments.allow_spills)
    with explain(f"cannot write into {arguments.out}"):
        out = Path(arguments.out)
        out.mkdir(parents=True, exist_ok=True)
        for cubin in cubins:
            name = out / f"{cubin.unit}.{cubin.arch}"
            shutil.copyfile(cubin.path, f"{name}.cubin")
            if arguments.keep_ptx:
                shutil.copyfile(cubin.path.with_suffix(".ptx"), f"{name}.ptx")
            log(f"{cubin.sha256}  {name}.cubin")


def command_module(arguments: argparse.Namespace) -> None:
    """Build flash_kda/_native in place."""
    module = build.build_native(Path(arguments.out), arguments.python, setting=arguments.archs, log=log)
    log(f"wrote {module}")


def log(text: str) -> None:
    print(text, flush=True)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python3 -m tools", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    cubins = commands.add_parser("cubins", help="compile device code alone, into a folder")
    cubins.add_argument("--arch", default="", help=f"{allowed()} (default: FLASH_KDA_CUDA_ARCHS, else auto)")
    cubins.add_argument("--out", required=True, help="folder for UNIT.ARCH.cubin")
    cubins.add_argument("--unit", action="append", choices=sorted(UNIT_BY_NAME), help="only this unit; may be repeated")
    cubins.add_argument("--source", help="compile this .cu instead of the units, for experiments")
    cubins.add_argument("--option", action="append", default=[], help="extra option for NVRTC, as --option=-DX=1; may be repeated")
    cubins.add_argument("--keep-ptx", action="store_true", help="also write UNIT.ARCH.ptx")
    cubins.add_argument("--lineinfo", action="store_true", help="line tables for profilers; holds paths of this machine")
    cubins.add_argument("--allow-spills", action="store_true", help="report register spills, but go on")
    cubins.set_defaults(run=command_cubins)

    module = commands.add_parser("module", help="build flash_kda/_native in place, for any Python of this machine")
    module.add_argument("--python", default=sys.executable, help="the Python that will import it (default: this one)")
    module.add_argument("--archs", default="", help=f"{allowed()} (default: FLASH_KDA_CUDA_ARCHS, else auto)")
    module.add_argument("--out", default=str(ROOT / "flash_kda"), help="folder for the module (default: flash_kda/)")
    module.set_defaults(run=command_module)
    return top


def main() -> int:
    arguments = parser().parse_args()
    try:
        arguments.run(arguments)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {os_error_text(error, 'the build stopped')}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
