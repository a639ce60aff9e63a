"""The bridge from setuptools to tools/: the native module is built there, and wheels are made reproducible there."""

import os
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from flash_kda.verify import label  # noqa: E402
from tools import settings  # noqa: E402
from tools.archs import plan  # noqa: E402
from tools.build import build_native  # noqa: E402
from tools.errors import BuildError, explain  # noqa: E402
from tools.toolchain import exclusive  # noqa: E402
from tools.units import ARCHS  # noqa: E402
from tools.wheels import normalise  # noqa: E402


class BuildPython(build_py):
    def run(self) -> None:
        # A module that was deleted from the sources would otherwise live on in the next wheel.
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib) / "flash_kda", ignore_errors=True)
        super().run()


class BuildNative(build_ext):
    def run(self) -> None:
        in_place = self.inplace or self.editable_mode
        folder = ROOT / "flash_kda" if in_place else Path(self.build_lib) / "flash_kda"
        base = ROOT / self.get_finalized_command("build").build_base
        build_native(folder.absolute(), base=base)


class BuildWheel(bdist_wheel):
    def run(self) -> None:
        super().run()
        for command, _, path in self.distribution.dist_files:
            if command == "bdist_wheel":
                normalise(Path(path))


def local_version() -> str:
    """A wheel that holds only some of the architectures says so in its version: +sm90a. Sources hold them all."""
    if "sdist" in sys.argv:
        return ""
    archs = plan().archs
    return "" if len(archs) == len(ARCHS) else f"+{label(list(archs))}"


def main() -> None:
    # umask and locale of the builder must not show in what is built.
    os.umask(0o022)
    if settings.text(settings.MACHINE):
        os.environ["_PYTHON_HOST_PLATFORM"] = (
            f"linux-{settings.machine()}"  # what sysconfig, and so the wheel's tag, takes this machine for
        )
    setup(
        packages=["flash_kda"],
        package_data={"flash_kda": ["py.typed", "*.pyi"]},
        ext_modules=[Extension("flash_kda._native", sources=[])],
        options={"egg_info": {"tag_build": local_version()}},
        cmdclass={"build_py": BuildPython, "build_ext": BuildNative, "bdist_wheel": BuildWheel},
    )


try:
    with explain(f"cannot write into {ROOT / 'build'}"):
        (ROOT / "build").mkdir(exist_ok=True)
    # setuptools keeps its state in build/ and in the egg-info folder, so only one build at a time may run in a tree.
    with exclusive(ROOT / "build" / ".lock", print):
        main()
except BuildError as error:
    raise SystemExit(f"error: {error}") from None
