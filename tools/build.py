"""The whole build in one place: plan, toolchain, device code, host module. setup.py and the command line call this."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Optional

from tools import ROOT, device, embed, host, settings
from tools.archs import Plan, plan
from tools.errors import BuildError, explain
from tools.locks import compare_with_lock
from tools.toolchain import DEVICE, HOST, Log, Toolchain, obtain

BUILD = ROOT / "build"


def device_store(base: Path = BUILD) -> Path:
    """Where cubins are kept between builds; several Pythons share it."""
    return base / "device"


def compile_plan(
    chosen: Plan, toolchain: Toolchain, store: Path, log: Log = print, allow_spills: bool = False
) -> list[device.Cubin]:
    """Every cubin of a plan."""
    jobs = [device.Job(unit, arch) for unit, arch in chosen.jobs()]
    return device.build(jobs, toolchain, store, log, allow_spills)


def check_lock(cubins: list[device.Cubin], log: Log = print) -> None:
    """Raises BuildError if the cubins are not those of device-code.lock, unless FLASH_KDA_ALLOW_UNLOCKED=1."""
    differences = compare_with_lock([cubin.record() for cubin in cubins])
    if not differences:
        log(f"device code: {len(cubins)} cubins are those of device-code.lock")
        return
    for difference in differences:
        log(f"device-code.lock: {difference}")
    if settings.flag(settings.ALLOW_UNLOCKED):
        log(f"device-code.lock: {settings.ALLOW_UNLOCKED}=1 lets this pass, and the build record says so")
        return
    raise BuildError(
        f"device code differs from device-code.lock ({'; '.join(differences)}); if the kernels or the toolchain were "
        "changed on purpose, renew it with: python3 -m tools lock"
    )


def build_native(
    output_folder: Path, python: Optional[str] = None, base: Path = BUILD, setting: str = "", log: Log = print
) -> Path:
    """Build flash_kda/_native for a Python (default: this one) into `output_folder`; returns the module's path."""
    chosen = plan(setting)
    target = host.describe_python(python) if python else host.describe_python()
    log(f"architectures: {', '.join(chosen.archs)} ({'; '.join(chosen.reasons)})")
    toolchain = obtain((DEVICE, HOST), log)
    cxx = host.compiler(target, toolchain)
    unlocked = settings.flag(settings.ALLOW_UNLOCKED)
    cubins = compile_plan(chosen, toolchain, device_store(base), log, allow_spills=unlocked)
    check_lock(cubins, log)
    record = embed.build_record(chosen, cubins, toolchain, cxx.name)
    module = output_folder / target.module_name
    with explain(f"cannot write into {base}"):
        base.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".part-host-", dir=base))
    try:
        log(f"host module: compiling for Python {target.version} with {cxx.name}")
        embedded = embed.write_embedded(cubins, record, folder)
        with explain(f"cannot write {module}"):
            output_folder.mkdir(parents=True, exist_ok=True)
        host.build_module(target, cxx, toolchain, embedded, module)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    log(f"host module: {module.name}, {os.path.getsize(module) / 1024:.0f} KB")
    return module
