"""Device code: each unit and architecture from CUDA C++ over PTX to a cubin, several at once, kept by the digest of its inputs."""

import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from tools import ROOT, ptx, ptxas, settings
from tools.errors import BuildError, explain
from tools.process import capture, last_error
from tools.toolchain import Log, Toolchain
from tools.units import Unit

SOURCES = ROOT / "csrc"  # the one include root of device code
JOB_MEMORY = 2 << 30  # bytes; NVRTC takes 1.3 to 1.9 GB for a kernel that uses CuTe
JOB_SECONDS = 4  # about, for one cubin on one core

OPTIONS = (
    "-std=c++17",
    # CUTLASS has about a hundred functions without an execution space.
    "-default-device",
    "-DNDEBUG",
)


@dataclass(frozen=True)
class Job:
    """One cubin to make."""

    unit: Unit
    arch: str
    root: Path = SOURCES
    options: tuple[str, ...] = ()  # extra options for NVRTC
    lineinfo: bool = False

    @property
    def name(self) -> str:
        return f"{self.unit.name}.{self.arch}"

    @property
    def compiler_options(self) -> tuple[str, ...]:
        line = ("-lineinfo",) if self.lineinfo else ()
        return (f"--gpu-architecture=compute_{self.arch}", *OPTIONS, *line, *self.unit.options, *self.options)


@dataclass
class Cubin:
    """A finished cubin. `resources` are ptxas' figures per function."""

    unit: str
    arch: str
    path: Path
    sha256: str
    size: int
    resources: ptxas.Resources
    warnings: list[str] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """What device-code.lock and the build record say about it."""
        identity = {"unit": self.unit, "arch": self.arch, "sha256": self.sha256, "size": self.size}
        return {**identity, "functions": self.resources}


def sources(job: Job) -> list[Path]:
    """The unit's source and every header of ours that it can reach, whatever the preprocessor would decide."""
    seen: dict[Path, None] = {}
    todo = [(job.root / job.unit.source).resolve()]
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen[path] = None
        with explain(f"cannot read the kernel source of {job.unit.name}"):
            text = path.read_text(encoding="utf-8")
        for target in re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', text, re.MULTILINE):
            for base in (path.parent, job.root, SOURCES):
                if (base / target).is_file():
                    todo.append((base / target).resolve())
                    break
    return sorted(seen)


def inputs_digest(job: Job, toolchain_digest: str) -> str:
    """sha256 over all that decides a cubin: our sources, the options, the toolchain and this recipe."""
    digest = hashlib.sha256()
    recipe = [Path(__file__).with_name(name) for name in ("device.py", "nvrtc.py", "ptx.py", "ptxas.py")]
    for path in (*sources(job), *recipe):
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    digest.update(json.dumps([job.unit.source, job.compiler_options, toolchain_digest]).encode())
    return digest.hexdigest()


def build(
    jobs: list[Job], toolchain: Toolchain, store: Path, log: Log = print, allow_spills: bool = False
) -> list[Cubin]:
    """Make every cubin, or take it from `store`; the result is in the order of `jobs`.

    Raises BuildError for what the compilers refuse and for spills that the unit does not allow.
    """
    count = job_count(len(jobs))
    log(f"device code: {len(jobs)} cubins, {count} at a time")
    done: dict[int, Cubin] = {}
    pool = ThreadPoolExecutor(count)
    try:
        futures = {}
        for index, job in enumerate(jobs):
            futures[pool.submit(_make, job, toolchain, store)] = index
        pending = set(futures)
        while pending:
            finished, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in finished:
                cubin, seconds = future.result()
                done[futures[future]] = cubin
                took = "kept from before" if seconds is None else f"{seconds:.1f} s"
                log(f"device code [{len(done)}/{len(jobs)}] {describe(cubin)}, {took}")
                for warning in cubin.warnings:
                    log(f"  {warning}")
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    cubins = [done[index] for index in range(len(jobs))]
    for job, cubin in zip(jobs, cubins):
        spills = ptxas.spilling(cubin.resources, job.unit.spills_allowed)
        if not spills:
            continue
        text = f"registers spill in {job.unit.name} for sm_{job.arch}: {', '.join(spills)}"
        if not allow_spills:
            raise BuildError(f"{text}; see spills_allowed in tools/units.py")
        log(text)
    return cubins


def describe(cubin: Cubin) -> str:
    """One line: name, size, and for each function registers, spills and static shared memory."""
    functions = [
        f"{name} {f['registers']} registers, {f['spill_stores'] + f['spill_loads']} B spilled, {f['shared']} B shared"
        for name, f in cubin.resources.items()
    ]
    return f"{cubin.unit} sm_{cubin.arch}: {cubin.size / 1024:.0f} KB; " + "; ".join(functions)


def is_kept(job: Job, toolchain_digest: str, store: Path) -> bool:
    """Whether build() would find this cubin in `store`."""
    return _load(job, _folder(job, toolchain_digest, store)) is not None


def _folder(job: Job, toolchain_digest: str, store: Path) -> Path:
    return store / f"{job.name}-{inputs_digest(job, toolchain_digest)[:16]}"


def _make(job: Job, toolchain: Toolchain, store: Path) -> tuple[Cubin, Optional[float]]:
    folder = _folder(job, toolchain.digest, store)
    kept = _load(job, folder)
    if kept:
        return kept, None
    start = time.monotonic()
    with explain(f"cannot write device code into {store}"):
        store.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".part-{job.name}-", dir=store) as part:
            made = _compile(job, toolchain, Path(part))
            os.chmod(part, 0o755)
            shutil.rmtree(folder, ignore_errors=True)
            try:
                os.rename(part, folder)
            except OSError:
                # Another build of the same inputs was faster; its result is the same.
                if not _load(job, folder):
                    raise
    made.path = folder / "code.cubin"
    return made, time.monotonic() - start


def _load(job: Job, folder: Path) -> Optional[Cubin]:
    """A cubin made before, or None if it is not there or not as it was written."""
    try:
        record = json.loads((folder / "record.json").read_text(encoding="utf-8"))
        code = (folder / "code.cubin").read_bytes()
        if hashlib.sha256(code).hexdigest() != record["sha256"]:
            return None
        found = Cubin(job.unit.name, job.arch, folder / "code.cubin", record["sha256"], len(code), record["functions"])
        found.warnings = record["warnings"]
        return found
    except (OSError, ValueError, KeyError):
        return None


def _compile(job: Job, toolchain: Toolchain, folder: Path) -> Cubin:
    with explain(f"cannot write device code into {folder}"):
        raw, clean, cubin = folder / "raw.ptx", folder / "code.ptx", folder / "code.cubin"
        warnings = run_nvrtc(job, toolchain, raw)
        clean.write_text(ptx.strip_unused_globals(raw.read_text(encoding="utf-8")), encoding="utf-8")
        raw.unlink()
        options = ("-lineinfo",) if job.lineinfo else ()
        resources, notes = ptxas.assemble(toolchain.ptxas, clean, cubin, job.arch, options)
        code = cubin.read_bytes()
        result = Cubin(job.unit.name, job.arch, cubin, hashlib.sha256(code).hexdigest(), len(code), resources)
        result.warnings = warnings + notes
        record = json.dumps({**result.record(), "warnings": result.warnings}, indent=1)
        (folder / "record.json").write_text(record, encoding="utf-8")
        return result


def run_nvrtc(job: Job, toolchain: Toolchain, output: Path) -> list[str]:
    """Write the PTX of a job; returns the compiler's warnings. Raises BuildError with its first error."""
    includes = [f"--include-path={path}" for path in (job.root, SOURCES, *toolchain.device_includes)]
    script = Path(__file__).with_name("nvrtc.py")
    source = job.root / job.unit.source
    # -I: neither the user's site-packages nor PYTHONPATH have a say in the compile.
    command = [sys.executable, "-I", str(script), str(toolchain.nvrtc), str(source), job.unit.source, str(output)]
    with explain("cannot start the device compiler"):
        result = capture([*command, *job.compiler_options, *includes], cwd=job.root)
    if result.returncode < 0:
        raise BuildError(
            f"the device compiler was killed (signal {-result.returncode}) at {job.name}: out of memory? set {settings.JOBS}=1; it needs 2 GB"
        )
    if result.returncode == 2:
        raise BuildError(f"cannot write device code into {output.parent}: {last_error(result.stderr)}")
    if result.returncode != 0:
        sys.stderr.write(result.stderr)
        raise BuildError(f"{job.unit.source} does not compile for sm_{job.arch}: {last_error(result.stderr)}")
    # The headers of the toolchain have warnings of their own, which nobody here can mend.
    foreign = tuple(map(str, toolchain.device_includes))
    return [line for line in result.stderr.splitlines() if ": warning " in line and not line.startswith(foreign)]


def job_count(wanted: int) -> int:
    """How many device compilers fit into free memory and onto the cores, at most `wanted`, at least one."""
    forced = settings.jobs()
    if forced:
        return max(1, min(wanted, forced))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(wanted, cores, free_memory() // JOB_MEMORY))


def free_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can be taken: what the kernel calls available, or less if a control group (container) leaves less."""
    free = JOB_MEMORY
    with contextlib.suppress(OSError):
        available = re.search(
            r"^MemAvailable:\s+(\d+) kB", (proc / "meminfo").read_text(encoding="ascii"), re.MULTILINE
        )
        free = int(available[1]) * 1024 if available else free
    version_1 = "memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"
    for limit, used in (("memory.max", "memory.current"), version_1):
        # No such controller, or the limit is "max".
        with contextlib.suppress(OSError, ValueError):
            free = min(free, int((cgroup / limit).read_text()) - int((cgroup / used).read_text()))
    return free
