"""python3 -m tools: everything a developer or a user does with this tree, on a bare Python."""

import argparse
import contextlib
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from tools import ROOT, build, device, host, pins, sbom, settings, wheels
from tools.archs import allowed, plan
from tools.errors import BuildError, explain, os_error_text
from tools.locks import DEVICE_CODE_LOCK, compare_with_lock, toolchain_digest, write_device_code_lock
from tools.toolchain import DEVICE, HOST, WHEEL, exclusive, fetch_all, obtain, source_of
from tools.units import UNIT_BY_NAME, Unit
from tools.venvs import Environment


def command_cubins(arguments: argparse.Namespace) -> None:
    """Compile device code alone."""
    chosen = plan(arguments.arch)
    toolchain = obtain((DEVICE,), log)
    jobs = []
    if arguments.source:
        source = Path(arguments.source).resolve()
        unit = Unit(source.stem, source.name, chosen.archs)
        jobs = [
            device.Job(unit, arch, source.parent, tuple(arguments.option), arguments.lineinfo) for arch in chosen.archs
        ]
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


def command_plan(arguments: argparse.Namespace) -> None:
    """Say what a build would do, and do nothing."""
    chosen = plan(arguments.archs)
    jobs = [device.Job(unit, arch) for unit, arch in chosen.jobs()]
    digest = toolchain_digest()
    todo = [job for job in jobs if not device.is_kept(job, digest, build.device_store())]
    count = device.job_count(len(jobs))
    python = host.describe_python()
    rows = [("architectures", ", ".join(chosen.archs))]
    rows += [("why", reason) for reason in chosen.reasons]
    rows += [
        ("device code", f"{len(jobs)} cubins: " + ", ".join(job.name for job in jobs)),
        ("", f"{len(jobs) - len(todo)} of them are kept from an earlier build"),
        (
            "",
            f"{count} at a time: {os.cpu_count()} cores, {device.free_memory() / 2**30:.0f} GB of memory free, 2 GB each",
        ),
        ("host module", f"for Python {python.version}, with {host.compiler_name(python)}"),
        ("toolchain", source_of((DEVICE, HOST))),
        ("time", f"about {len(todo) * device.JOB_SECONDS // count + HOST_SECONDS} s, besides what pip downloads"),
    ]
    rows += [("setting", f"{name}={settings.text(name)}") for name in settings.VARIABLES if settings.text(name)]
    for key, value in rows:
        log(f"{key:14}{value}")


HOST_SECONDS = 20  # to compile and link the host module; the first time 60, since zig builds its C++ library


REQUIREMENTS = ROOT / "tools" / "test-requirements.txt"


def command_wheel(arguments: argparse.Namespace) -> None:
    """Build a release wheel, install it into a fresh environment and let it check itself."""
    wheel = wheels.release(
        arguments.archs or settings.text(settings.CUDA_ARCHS) or "all", Path(arguments.out).absolute(), log
    )
    if arguments.build_only:
        return
    if settings.machine() != platform.machine():
        log(f"wheel: {wheel}, for {settings.machine()}: not tried here")
        return
    environment = Environment(build.BUILD / "venv-wheel")
    log("installing it into a fresh environment" + ("" if arguments.no_torch else ", with torch"))
    environment.install(str(wheel), *(["--no-deps"] if arguments.no_torch else ["-c", str(REQUIREMENTS)]))
    # From another folder, since flash_kda/ of this tree would be imported here.
    # 0 a kernel runs, 3 in order but without a GPU, 4 in order but without torch.
    expected = (0, 3, 4) if arguments.no_torch else (0, 3)
    if environment.run("python", "-m", "flash_kda", "doctor", cwd=build.BUILD) not in expected:
        raise BuildError(f"the doctor is not content with {wheel.name}; what it says is above")
    log(f"wheel: {wheel}")


def command_repair(arguments: argparse.Namespace) -> None:
    """Give wheels that pip has built their manylinux tag, and check them."""
    toolchain = obtain((WHEEL,), log)
    for raw in arguments.wheels:
        log(f"wheel: {wheels.repair(raw, toolchain, Path(arguments.out).absolute())}")


def command_index(arguments: argparse.Namespace) -> None:
    """Lay out a static package index."""
    for folder in wheels.write_index(arguments.wheels, Path(arguments.out).absolute()):
        log(f"index: {folder}")


def command_test(arguments: argparse.Namespace) -> int:
    """Build and install the wheel, then linters, types and all tests."""
    if sys.version_info < (3, 10):
        raise BuildError("the tests need Python 3.10 or newer; with 3.9 one can build and use flash_kda")
    wheel = wheels.release("all", ROOT / "dist", log)
    environment = Environment(build.BUILD / "venv-test")
    log("installing the wheel and the test requirements into a fresh environment")
    environment.install(str(wheel), "-r", str(REQUIREMENTS))
    for name, command in checks():
        log(f"{name}: checking")
        if environment.run(*command, cwd=ROOT) != 0:
            raise BuildError(f"{name} is not content, see above; python3 -m tools format mends what it can")
    log("pytest")
    return environment.run("pytest", *arguments.pytest, cwd=ROOT, FLASH_KDA_TEST_WHEEL=str(wheel))


def checks() -> "list[tuple[str, list[str]]]":
    """The checks of style and types, each with its command."""
    return [
        ("ruff", ["ruff", "check", "--quiet", "."]),
        ("ruff format", ["ruff", "format", "--check", "--quiet", "."]),
        ("mypy", ["mypy", "--no-error-summary"]),
        ("clang-format", ["clang-format", "--dry-run", "-Werror", *native_sources()]),
    ]


def native_sources() -> "list[str]":
    endings = (".h", ".cpp", ".cuh", ".cu")
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*") if path.suffix in endings)


def command_format(arguments: argparse.Namespace) -> None:
    """Bring all sources into the form that the checks want."""
    environment = Environment(build.BUILD / "venv-format")
    lines = REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    environment.install(*(pin for pin in lines if pin.startswith(("ruff", "clang-format"))))
    files = arguments.files or ["."]
    python = [name for name in files if not name.endswith((".h", ".cpp", ".cuh", ".cu"))]
    native = [name for name in files if name not in python] if arguments.files else native_sources()
    status = 0
    if python:
        status |= environment.run("ruff", "check", "--quiet", "--fix", *python, cwd=ROOT)
        status |= environment.run("ruff", "format", "--quiet", *python, cwd=ROOT)
    if native:
        status |= environment.run("clang-format", "-i", *native, cwd=ROOT)
    if status:
        raise BuildError("not everything could be mended, see above")


def command_lock(arguments: argparse.Namespace) -> None:
    """Build all device code and write device-code.lock."""
    chosen = plan("all")
    cubins = build.compile_plan(chosen, obtain((DEVICE,), log), build.device_store(), log, allow_spills=False)
    records = [cubin.record() for cubin in cubins]
    differences = compare_with_lock(records) if DEVICE_CODE_LOCK.exists() else ["written for the first time"]
    write_device_code_lock(records)
    for difference in differences:
        log(f"device-code.lock: {difference}")
    log(f"device-code.lock: {len(records)} cubins, {'renewed' if differences else 'as before'}")


def command_pins(arguments: argparse.Namespace) -> None:
    """Bring what is written from matrix.json and toolchain.lock up to date, and renew pins if asked to."""
    if arguments.check:
        stale = pins.stale()
        if stale:
            raise BuildError(
                f"not as matrix.json and toolchain.lock have it: {', '.join(stale)}; run python3 -m tools pins"
            )
        log("pins: everything agrees")
        return
    if arguments.images:
        pins.renew_images(log)
    if arguments.torch:
        pins.TORCH.write_text(pins.torch_requirements(arguments.torch), encoding="utf-8")
    pins.write(log)


def command_sbom(arguments: argparse.Namespace) -> None:
    """Write the bill of materials."""
    with explain(f"cannot write {arguments.out}"):
        Path(arguments.out).write_text(sbom.bill(), encoding="utf-8")


def command_toolchain(arguments: argparse.Namespace) -> None:
    """Download every wheel of toolchain.lock for builds without network."""
    fetch_all(Path(arguments.out).absolute(), log)
    place = shlex.quote(str(Path(arguments.out).absolute()))
    log(f"elsewhere, without network: {settings.TOOLCHAIN_DIR}={place} python3 -m tools wheel --no-torch")


def log(text: str) -> None:
    print(text, flush=True)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python3 -m tools", description=__doc__)
    top.set_defaults(alone=False)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    sub = commands.add_parser(
        "wheel", help="build a release wheel, install it into a fresh environment, run its doctor"
    )
    sub.add_argument("--archs", default="", help=f"{allowed()} (default: FLASH_KDA_CUDA_ARCHS, else all)")
    sub.add_argument("--out", default=str(ROOT / "dist"), help="folder for the wheel (default: dist/)")
    sub.add_argument(
        "--no-torch", action="store_true", help="install without torch: quicker, and the doctor checks less"
    )
    sub.add_argument("--build-only", action="store_true", help="do not install it and run its doctor")
    sub.set_defaults(run=command_wheel, alone=True)

    sub = commands.add_parser("repair", help="give wheels that pip has built their manylinux tag, and check them")
    sub.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL")
    sub.add_argument("--out", default=str(ROOT / "dist"), help="folder for the wheels (default: dist/)")
    sub.set_defaults(run=command_repair)

    sub = commands.add_parser(
        "index", help="lay out a static package index (PEP 503) for wheels of any Python and machine"
    )
    sub.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL")
    sub.add_argument("--out", required=True, help="folder of the index")
    sub.set_defaults(run=command_index)

    sub = commands.add_parser("test", help="build and install the wheel; linters, types, all tests")
    sub.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    sub.set_defaults(run=command_test, alone=True)

    sub = commands.add_parser("plan", help="say what a build would do and why; builds nothing")
    sub.add_argument("--archs", default="", help=f"{allowed()} (default: FLASH_KDA_CUDA_ARCHS, else auto)")
    sub.set_defaults(run=command_plan)

    sub = commands.add_parser("lock", help="build all device code and write device-code.lock")
    sub.set_defaults(run=command_lock, alone=True)

    sub = commands.add_parser("format", help="bring the sources into the form that the checks want")
    sub.add_argument("files", nargs="*", help="only these files (default: all)")
    sub.set_defaults(run=command_format, alone=True)

    sub = commands.add_parser("pins", help="bring what repeats matrix.json and toolchain.lock up to date; renew pins")
    choice = sub.add_mutually_exclusive_group()
    choice.add_argument("--check", action="store_true", help="write nothing; fail if a file is stale")
    choice.add_argument("--images", action="store_true", help="ask the registries for the digests of the base images")
    choice.add_argument(
        "--torch", metavar="VERSION", help="pin that torch, and all that it needs, for the runtime image"
    )
    sub.set_defaults(run=command_pins)

    sub = commands.add_parser("sbom", help="write the bill of materials of a release (CycloneDX)")
    sub.add_argument("--out", required=True, help="the file")
    sub.set_defaults(run=command_sbom)

    sub = commands.add_parser(
        "toolchain", help="download the toolchain's wheels into a folder, for builds without network"
    )
    sub.add_argument("--out", required=True, help="the folder")
    sub.set_defaults(run=command_toolchain)

    cubins = commands.add_parser("cubins", help="compile device code alone, into a folder")
    cubins.add_argument("--arch", default="", help=f"{allowed()} (default: FLASH_KDA_CUDA_ARCHS, else auto)")
    cubins.add_argument("--out", required=True, help="folder for UNIT.ARCH.cubin")
    cubins.add_argument("--unit", action="append", choices=sorted(UNIT_BY_NAME), help="only this unit; may be repeated")
    cubins.add_argument("--source", help="compile this .cu instead of the units, for experiments")
    cubins.add_argument(
        "--option", action="append", default=[], help="extra option for NVRTC, as --option=-DX=1; may be repeated"
    )
    cubins.add_argument("--keep-ptx", action="store_true", help="also write UNIT.ARCH.ptx")
    cubins.add_argument(
        "--lineinfo", action="store_true", help="line tables for profilers; holds paths of this machine"
    )
    cubins.add_argument("--allow-spills", action="store_true", help="report register spills, but go on")
    cubins.set_defaults(run=command_cubins)

    module = commands.add_parser("module", help="build flash_kda/_native in place, for any Python of this machine")
    module.add_argument("--python", default=sys.executable, help="the Python that will import it (default: this one)")
    module.add_argument("--archs", default="", help=f"{allowed()} (default: FLASH_KDA_CUDA_ARCHS, else auto)")
    module.add_argument("--out", default=str(ROOT / "flash_kda"), help="folder for the module (default: flash_kda/)")
    module.set_defaults(run=command_module)
    return top


@contextlib.contextmanager
def only_one() -> Iterator[None]:
    """Hold this tree: commands that make an environment or a wheel in it run one after the other."""
    with explain(f"cannot write into {build.BUILD}"):
        build.BUILD.mkdir(exist_ok=True)
    with exclusive(build.BUILD / ".tools.lock", log):
        yield


def main() -> int:
    arguments = parser().parse_args()
    try:
        with only_one() if arguments.alone else contextlib.nullcontext():
            return int(arguments.run(arguments) or 0)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {os_error_text(error, 'the build stopped')}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
