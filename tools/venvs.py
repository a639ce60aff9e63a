"""Fresh virtual environments, on Pythons with or without ensurepip."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from tools.errors import BuildError, explain
from tools.process import capture, last_error
from tools.toolchain import pip_command


class Environment:
    """A virtual environment that is made anew at `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        with explain(f"cannot make a virtual environment in {folder}"):
            shutil.rmtree(folder, ignore_errors=True)
            # The caller's pip installs into it: quicker than ensurepip, which some distributions leave out besides.
            venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)

    def clean(self) -> "dict[str, str]":
        """An environment variable set in which nothing leads out of the virtual environment."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        path = os.pathsep.join((str(self.folder / "bin"), os.environ.get("PATH", os.defpath)))
        return {**kept, "VIRTUAL_ENV": str(self.folder), "PATH": path}

    def install(self, *arguments: str) -> None:
        """pip install, with the user's pip configuration."""
        options = ["--quiet", "--disable-pip-version-check", "--no-input"]
        command = [*pip_command(), "--python", str(self.python), "install", *options, *arguments]
        result = capture(command, env=self.clean())
        output = result.stdout + result.stderr
        if result.returncode != 0 and "no such option: --python" in output:
            raise BuildError(f"pip is older than 22.3; renew it with: {sys.executable} -m pip install --upgrade pip")
        if result.returncode != 0:
            errors = [line for line in output.splitlines() if "ERROR" in line]
            raise BuildError(
                f"pip cannot install {' '.join(arguments)}: {errors[-1] if errors else last_error(output)}"
            )

    def run(self, *command: str, cwd: Path, **variables: str) -> int:
        """Run a program of the environment with its output going through; returns its exit status."""
        sys.stdout.flush()
        program = str(self.folder / "bin" / command[0])
        return subprocess.run(
            [program, *command[1:]], cwd=cwd, env={**self.clean(), **variables}, check=False
        ).returncode
