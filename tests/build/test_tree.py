"""What must not be in the tree: hosts of package registries, paths of somebody's machine, calls of git by the build."""

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import ROOT

# Written in two parts, since this file is read too.
REGISTRIES = ["pypi" + ".org", "python" + "hosted.org", "pypi." + "nvidia.com", "conda." + "anaconda.org"]
HOME = re.compile(r"/(?:home|Users)/(?!somebody)\w+/|/ro{2}t/")
SKIP = {".git", "build", "dist", "__pycache__", ".venv"}


@functools.cache
def texts() -> dict[str, str]:
    """Every text file of the tree by its relative path."""
    found = {}
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        generated = (
            parts[0] in SKIP
            or "__pycache__" in parts
            or any(p.endswith((".egg-info", "_cache", ".hypothesis")) for p in parts)
        )
        if path.is_file() and not generated:
            try:
                found["/".join(parts)] = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
    return found


def configured_hosts() -> list[str]:
    """Hosts that this machine's pip is set to, learnt from pip itself."""
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    return sorted(set(re.findall(r"https?://(?:[^/@\s']*@)?([^/:\s']+)", listing.stdout)) - {"127.0.0.1", "localhost"})


@pytest.mark.parametrize("host", [*REGISTRIES, *configured_hosts()])
def test_no_registry_is_named(host: str) -> None:
    assert [name for name, text in texts().items() if host in text] == []


def test_no_path_of_a_machine() -> None:
    own = str(ROOT)
    found = [name for name, text in texts().items() if own in text or HOME.search(text)]
    assert [name for name in found if name not in ("tests/build/test_tree.py", "tools/wheels.py")] == []


def test_the_build_calls_no_git() -> None:
    called = re.compile(r"""["']git["' ]""")
    names = [name for name in texts() if name == "setup.py" or (name.startswith("tools/") and name.endswith(".py"))]
    assert names
    assert [name for name in names if called.search(texts()[name])] == []


def test_the_tools_need_only_the_standard_library() -> None:
    allowed = set(sys.stdlib_module_names) | {"tools", "flash_kda"}
    for name, text in texts().items():
        if name.startswith("tools/") and name.endswith(".py"):
            imported = re.findall(r"^\s*(?:from|import)\s+(\w+)", text, re.MULTILINE)
            assert set(imported) <= allowed, name


def test_every_command_explains_itself() -> None:
    listing = subprocess.run(
        [sys.executable, "-m", "tools", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for command in (
        "plan",
        "wheel",
        "test",
        "lock",
        "cubins",
        "module",
        "format",
        "toolchain",
        "repair",
        "index",
        "pins",
        "sbom",
    ):
        assert re.search(rf"^    {command}\s+\w", listing.stdout, re.MULTILINE), command


def test_python_files_parse_on_the_oldest_python() -> None:
    """Nothing newer than 3.9 in the syntax of what is shipped or builds."""
    import ast

    for name, text in texts().items():
        if name.endswith(".py") and Path(name).parts[0] in ("tools", "flash_kda", "setup.py"):
            ast.parse(text, name, feature_version=(3, 9))
