"""The host module: C++ of csrc/host and csrc/bindings.cpp, compiled and linked for one Python with the pinned compiler."""

import json
import os
import shlex
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tools import ROOT, settings
from tools.errors import BuildError, explain
from tools.locks import read_toolchain_lock
from tools.process import capture, last_error
from tools.toolchain import Toolchain

FLAGS = (
    "-std=c++17",
    "-O2",
    "-g0",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-Wall",
)


@dataclass(frozen=True)
class Python:
    """What the compiler must know of the Python that will import the module."""

    executable: str
    version: str
    include: str
    multiarch: str  # Debian's Python keeps pyconfig.h in a folder of this name beside `include`; else empty
    suffix: str
    machine: str  # that the module is for

    @property
    def module_name(self) -> str:
        return f"_native{self.suffix}"


def describe_python(executable: str = sys.executable) -> Python:
    """Ask a Python for its headers and module suffix. Raises BuildError if it has no headers.

    For another machine (FLASH_KDA_MACHINE) the headers are those of the Python at hand: on Linux x86_64 and aarch64 the types that they
    describe have the same sizes, which pyport.h and pybind11 check again as they are compiled.
    """
    script = (
        "import json, platform, sysconfig as s; print(json.dumps([platform.python_version(), "
        "s.get_path('include'), s.get_config_var('MULTIARCH') or '', s.get_config_var('EXT_SUFFIX'), "
        "platform.machine(), platform.system()]))"
    )
    with explain(f"cannot run {executable}"):
        result = capture([executable, "-c", script])
    if result.returncode != 0:
        raise BuildError(f"{executable} does not work as a Python: {last_error(result.stderr)}")
    version, include, multiarch, suffix, own_machine, system = json.loads(result.stdout)
    if system != "Linux" or own_machine not in ("x86_64", "aarch64"):
        raise BuildError(f"flash_kda is built on Linux x86_64 and aarch64, not on {system} {own_machine}")
    if not Path(include, "Python.h").is_file():
        raise BuildError(
            f"Python {version} ({executable}) has no {include}/Python.h; install its headers (python3-dev)"
        )
    machine = settings.machine() if settings.text(settings.MACHINE) else own_machine
    return Python(executable, version, include, multiarch, suffix.replace(own_machine, machine), machine)


@dataclass(frozen=True)
class Compiler:
    """How to call the host compiler."""

    command: tuple[str, ...]
    name: str  # for the build record
    environment: dict[str, str]


def compiler(python: Python, toolchain: Toolchain) -> Compiler:
    """The pinned compiler, or the one that FLASH_KDA_CXX names."""
    name = compiler_name(python)
    given = settings.text(settings.CXX)
    environment = {name: value for name, value in os.environ.items() if name not in _STEERING}
    if given:
        command = tuple(shlex.split(given))
        if not command or not shutil.which(command[0]):
            raise BuildError(f"{settings.CXX}={given}: no such compiler; unset it to use the pinned one")
        return Compiler(command, name, environment)
    for variable in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"):
        environment[variable] = str(toolchain.scratch / "zig")
    # Clang warns about flags that zig adds for its own headers; -Wall stays on for our code.
    return Compiler(
        (str(toolchain.zig), "c++", "-target", _target(python), "-Wno-unused-command-line-argument"),
        name,
        environment,
    )


def compiler_name(python: Python) -> str:
    """What the build record calls the compiler of this build."""
    given = settings.text(settings.CXX)
    if given:
        return Path(given.split()[0]).name
    return f"zig {read_toolchain_lock()['ziglang'].version} {_target(python)}"


def _target(python: Python) -> str:
    return f"{python.machine}-linux-gnu.{settings.glibc()}"


# Variables that make a compiler look elsewhere or write something else.
_STEERING = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "COMPILER_PATH")


def module_sources() -> list[Path]:
    """Our C++ files, in an order that does not depend on the file system."""
    files = [*sorted((ROOT / "csrc" / "host").glob("*.cpp")), ROOT / "csrc" / "bindings.cpp"]
    if not files[-1].is_file():
        raise BuildError("csrc/bindings.cpp is missing")
    return files


def python_headers(python: Python, scratch: Path) -> "list[str]":
    """Options that let the compiler find what a Python's headers include from elsewhere, through a folder in `scratch`.

    The compiler is shown that one folder and nothing else of /usr/include: the libc there is not the one that is targeted.
    """
    folder = scratch / "include"
    folder.mkdir(parents=True, exist_ok=True)
    # Python.h of 3.9 and 3.10 includes it where the system had it. Nothing here uses it, and newer systems have none.
    (folder / "crypt.h").write_text("", encoding="utf-8")
    # The pyconfig.h of a Debian Python includes <MULTIARCH/pythonX.Y/pyconfig.h>, relative to /usr/include.
    headers = Path(python.include)
    own = headers.parent / python.multiarch / headers.name
    if python.multiarch and (own / "pyconfig.h").is_file():
        link = folder / f"{python.machine}-linux-gnu" / headers.name
        link.parent.mkdir(parents=True)
        link.symlink_to(own)
    return ["-isystem", str(folder)]


def build_module(python: Python, cxx: Compiler, toolchain: Toolchain, embedded: Path, output: Path) -> None:
    """Compile and link `output` from our sources and `embedded` (embedded_cubins.cpp, beside its cubins)."""
    folder = embedded.parent
    includes = ["-I", str(ROOT / "csrc")]
    for path in (toolchain.pybind11_include, python.include, toolchain.cuda_include):
        includes += ["-isystem", str(path)]
    includes += python_headers(python, folder)
    # The value that __FILE__ and friends take must not depend on where the build is.
    maps = [f"-ffile-prefix-map={path}=." for path in (folder, ROOT, toolchain.scratch.parent)]
    sources = [*module_sources(), embedded]

    def compile_one(source: Path) -> Path:
        target = folder / f"{source.parent.name}_{source.stem}.o"
        run([*cxx.command, *FLAGS, *maps, *includes, "-c", str(source), "-o", str(target)], cxx, folder, source.name)
        return target

    with ThreadPoolExecutor(max(1, min(len(sources), os.cpu_count() or 1))) as pool:
        objects = list(pool.map(compile_one, sources))
    part = output.with_name(f".part-{os.getpid()}-{output.name}")
    exports = folder / "exports.map"
    link = [*cxx.command, "-shared", "-s", "-Wl,--build-id=none", "-Wl,-z,noexecstack", "-Wl,-z,relro,-z,now"]
    link.append(f"-Wl,--version-script={exports.name}")
    with explain(f"cannot write {output}"):
        # Our C++ runtime is our own: another library's operator new must not take the place of it, nor the other way.
        exports.write_text("{ global: PyInit__native; local: *; };\n", encoding="utf-8")
        try:
            run([*link, *(str(path) for path in objects), "-o", str(part), "-ldl"], cxx, folder, output.name)
            part.chmod(0o755)
            part.replace(output)
        finally:
            part.unlink(missing_ok=True)


def run(command: list[str], cxx: Compiler, folder: Path, what: str) -> None:
    """Run the compiler in `folder`; its warnings go through, an error ends the build with its first line."""
    with explain(f"cannot start the host compiler {command[0]}"):
        result = capture(command, cwd=folder, env=cxx.environment)
    if result.stderr:
        sys.stderr.write(result.stderr)
    if result.returncode != 0:
        raise BuildError(f"the host compiler failed at {what}: {last_error(result.stderr + result.stdout)}")
