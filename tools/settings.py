"""The environment variables that steer a build: each is named and read here, nowhere else."""

import os
import platform
import re
from pathlib import Path
from typing import Optional

from tools.errors import BuildError

CUDA_ARCHS = "FLASH_KDA_CUDA_ARCHS"  # auto | all | 90a,100a,...
TOOLCHAIN_DIR = "FLASH_KDA_TOOLCHAIN_DIR"  # a folder of wheels: nothing is downloaded
CACHE_DIR = "FLASH_KDA_CACHE_DIR"  # where the unpacked toolchain is kept
JOBS = "FLASH_KDA_JOBS"  # device compilers at once, instead of the number that memory and cores allow
ALLOW_UNLOCKED = "FLASH_KDA_ALLOW_UNLOCKED"  # 1: device code may differ from device-code.lock
CXX = "FLASH_KDA_CXX"  # host compiler instead of the pinned one; the wheel is then not a release
GLIBC = "FLASH_KDA_GLIBC"  # 2.17 (default) or 2.28: the oldest glibc that the module runs on
LOADER = "FLASH_KDA_LOADER"  # dynamic loader to start ptxas with, where the system has none in its usual place (NixOS)
MACHINE = "FLASH_KDA_MACHINE"  # x86_64 or aarch64: build for another machine than this one
COMMIT = "FLASH_KDA_COMMIT"  # a commit id for the build record, as of `git describe --always --abbrev=40 --dirty`

VARIABLES = (CUDA_ARCHS, TOOLCHAIN_DIR, CACHE_DIR, JOBS, ALLOW_UNLOCKED, CXX, GLIBC, LOADER, MACHINE, COMMIT)


def text(variable: str) -> str:
    return os.environ.get(variable, "").strip()


def flag(variable: str) -> bool:
    value = text(variable).lower()
    if value not in ("", "0", "1"):
        raise BuildError(f"{variable}={value}: expected 0 or 1")
    return value == "1"


def jobs() -> Optional[int]:
    value = text(JOBS)
    if not value:
        return None
    if not value.isdigit() or int(value) < 1:
        raise BuildError(f"{JOBS}={value}: expected a number from 1 on")
    return int(value)


def glibc() -> str:
    value = text(GLIBC) or "2.17"
    if value not in ("2.17", "2.28"):
        raise BuildError(f"{GLIBC}={value}: expected 2.17 or 2.28")
    return value


def machine() -> str:
    """The machine that the host module is for. Device code does not depend on it."""
    value = text(MACHINE) or platform.machine()
    if value not in ("x86_64", "aarch64"):
        raise BuildError(
            f"flash_kda is built for x86_64 and aarch64, not for {value}" + (f" ({MACHINE})" if text(MACHINE) else "")
        )
    return value


def commit() -> "dict[str, object]":
    """What the build record says of the sources; nothing if nothing was given. The build itself calls no git."""
    value = text(COMMIT)
    if not value:
        return {}
    match = re.fullmatch(r"([0-9a-f]{7,64})(-dirty)?", value)
    if not match:
        raise BuildError(
            f"{COMMIT}={value}: expected a commit id in hex, with -dirty behind it if the tree was changed"
        )
    return {"commit": match[1], "dirty": bool(match[2])}


def cache_root() -> Path:
    """Where downloads that outlive a build go; created by whoever writes there."""
    given = text(CACHE_DIR)
    if given:
        return Path(given).expanduser().absolute()
    base = text("XDG_CACHE_HOME")
    if base and os.path.isabs(base):
        return Path(base) / "flash_kda"
    try:
        return Path.home() / ".cache" / "flash_kda"
    except RuntimeError as error:
        raise BuildError(f"no home directory for the toolchain cache; set {CACHE_DIR} to a writable folder") from error
