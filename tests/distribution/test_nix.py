"""The flake, unchanged, with real nix, real sources and the real toolchain, on a stub of nixpkgs: see nixpkgs-stub/README.md."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import standins
from proof import Table, assert_same
from test_containers import LOCKED_UP

from tools import ROOT, locks, ptxas, settings, toolchain, wheels
from tools.errors import BuildError
from tools.matrix import MATRIX
from tools.process import capture

STUB = ROOT / "tests" / "distribution" / "nixpkgs-stub"
pytestmark = [
    pytest.mark.skipif(bool(standins.missing()), reason=standins.missing() or "nix can be run"),
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="the stub is for x86_64"),
    pytest.mark.skipif(
        not Path("/usr/include/python3.11/Python.h").exists(), reason="the stub's Python is Debian 12's, with headers"
    ),
]
# The whole of it is built from sources here and again by --rebuild. FLASH_KDA_TEST_SETTING=all takes all architectures.
SETTING = os.environ.get("FLASH_KDA_TEST_SETTING", "90a")


class Flake:
    """The flake in a folder of its own, a stub of nixpkgs beside it, and a store."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.source, self.stub, self.store = source, folder / "stub", folder / "store"
        shutil.copytree(STUB, self.stub)
        toolchain.fetch_all(self.stub / "wheelhouse", lambda line: None)
        (folder / "etc").mkdir()
        (folder / "etc" / "nix.conf").write_text(
            "experimental-features = nix-command flakes\nbuild-users-group =\nsandbox = true\nsubstituters =\nflake-registry =\n"
            "sandbox-paths = /bin /usr /lib /lib64 /etc/alternatives\n"
        )
        self.environment = {**os.environ, "NIX_CONF_DIR": str(folder / "etc"), "HOME": str(folder)}

    def run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        program = standins.started(standins.trixie("nix-bin"), "usr/bin/nix")
        options = ["--store", str(self.store), "--option", "build-hook", "", "--no-write-lock-file"]
        override = ["--override-input", "nixpkgs", f"path:{self.stub}"]
        return capture([*program, *command, *options, *override], cwd=self.source, env=self.environment)

    def build(self, *outputs: str) -> "list[Path]":
        names = [f"path:{self.source}#{output}" for output in outputs]
        result = self.run("build", "--no-link", "--print-out-paths", "--print-build-logs", *names)
        assert result.returncode == 0, result.stderr
        return [self.store / path.lstrip("/") for path in result.stdout.split()]


@pytest.fixture(scope="module")
def flake(tmp_path_factory: pytest.TempPathFactory) -> Flake:
    folder = tmp_path_factory.mktemp("nix")
    made = shutil.ignore_patterns(
        ".git", "build", "dist", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info", "*.so"
    )
    shutil.copytree(
        ROOT,
        folder / "source",
        ignore=lambda where, names: made(where, names) - ({"build"} if Path(where).name == "tests" else set()),
    )
    return Flake(folder / "source", folder)


def test_every_output_is_there_for_both_machines(flake: Flake) -> None:
    result = flake.run("flake", "show", "--json", "--all-systems", f"path:{flake.source}")
    assert result.returncode == 0, result.stderr
    shown = json.loads(result.stdout)
    expected = {f"{kind}-{setting}" for kind in ("wheel", "flash-kda", "image") for setting in MATRIX.settings}
    for machine in MATRIX.machines:
        system = f"{machine}-linux"
        assert set(shown["packages"][system]) == {*expected, "default", "toolchain"}
        assert set(shown["checks"][system]) == {"device-code", "import", "lock"}
        assert set(shown["devShells"][system]) == {"default", "test"}
        assert shown["formatter"][system]["type"] == "derivation"
    assert shown["overlays"]["default"]["type"] == "nixpkgs-overlay"


def test_the_gpu_check_asks_for_a_builder_with_a_gpu(flake: Flake) -> None:
    result = flake.run("derivation", "show", f"path:{flake.source}#default.gpuCheck")
    assert result.returncode == 0, result.stderr
    (derivation,) = json.loads(result.stdout).values()
    assert derivation["env"]["requiredSystemFeatures"] == "cuda"


def test_the_wheel_is_that_of_every_other_route(flake: Flake, tmp_path: Path, proof: Table) -> None:
    """Built in nix's sandbox from the sources; then its machine code is compared, and the whole of it if the Python is the same."""
    (wheel,) = flake.build(f"wheel-{SETTING}")
    named = tmp_path / wheel.name.split("-", 1)[1]
    shutil.copyfile(wheel, named)
    proof.add("nix build", named)
    if sys.version_info[:2] == (3, 11):
        assert_same(wheels.release(SETTING, tmp_path / "ours"), named)


def test_it_is_the_same_when_built_again(flake: Flake) -> None:
    flake.build(f"wheel-{SETTING}")
    result = flake.run("build", "--no-link", "--rebuild", f"path:{flake.source}#wheel-{SETTING}")
    assert result.returncode == 0, result.stderr


def test_the_image_runs(flake: Flake, tmp_path: Path) -> None:
    (image,) = flake.build(f"image-{SETTING}")
    capture(["sh", "-c", f"gunzip < {image} > {tmp_path}/image.tar"])
    standins.run("podman", "load", "--quiet", "--input", str(tmp_path / "image.tar"))
    command = ["podman", "run", "--rm", *LOCKED_UP, "localhost/flash_kda:0.1.0"]
    result = capture(command, env=standins.environment())
    assert result.returncode == 4, result.stdout + result.stderr
    assert "verdict     INCOMPLETE: the installation is in order, but torch >= 2.4 is needed" in result.stdout
    for cubin in locks.read_device_code_lock().values():
        assert (cubin["sha256"] in result.stdout) == (SETTING == "all" or cubin["arch"] == SETTING)


def test_the_checks_that_need_no_machine_code_of_all_settings(flake: Flake) -> None:
    (checked,) = flake.build("checks.x86_64-linux.lock")
    assert checked.read_text() == "pins: everything agrees\n"


@pytest.mark.skipif(SETTING != "all", reason="needs the wheel of all architectures: FLASH_KDA_TEST_SETTING=all")
def test_flake_check(flake: Flake) -> None:
    result = flake.run("flake", "check", f"path:{flake.source}")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("file", "old", "new", "output", "says"),
    [
        (
            "source/nix/wheels.json",
            '"sha256": "e',
            '"sha256": "f',
            "toolchain",
            "hash mismatch in fixed-output derivation",
        ),
        ("source/nix/package.nix", "torch-bin ];", "torch-binary ];", "default", "undefined variable 'torch-binary'"),
        ("source/flake.nix", "flash-kda-toolchain|", "", "toolchain", "has an unfree license, refusing to evaluate"),
        ("source/flake.nix", "|torch|", "|", "default", "has an unfree license, refusing to evaluate"),
        (
            "source/matrix.json",
            '"settings": ["all",',
            '"settings": ["80",',
            "default",
            "80 is none of the architectures in matrix.json",
        ),
    ],
    ids=["wrong hash", "wrong attribute", "toolchain not permitted", "torch not permitted", "wrong architecture"],
)
def test_what_is_wrong_fails(
    flake: Flake, tmp_path: Path, file: str, old: str, new: str, output: str, says: str
) -> None:
    path = flake.source.parent / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    try:
        result = flake.run("build", "--no-link", f"path:{flake.source}#{output}")
    finally:
        path.write_text(text)
    assert result.returncode != 0
    assert says in result.stderr, result.stderr


def test_what_the_flake_asks_of_nixpkgs_is_listed() -> None:
    """Each name that our Nix files take from nixpkgs is in the stub's README, with the file of nixpkgs in which it was looked up."""
    used = set()
    for path in sorted((ROOT / "nix").glob("*.nix")):
        text = re.sub(r"#.*", "", path.read_text())
        used |= {f"lib.{name}" for name in re.findall(r"\blib\.(\w+(?:\.\w+)?)", text)}
        arguments = re.match(r"\s*\{([^}]*)\}:", text)
        used |= set(re.findall(r"\w[\w-]*", arguments[1])) if arguments else set()
    own = {"commit", "lib", "machine", "matrix", "package", "setting", "source", "toolchain", "wheel"}
    listed = set(re.findall(r"^\| `([\w.-]+)`", (STUB / "README.md").read_text(), re.MULTILINE))
    assert sorted(used - own - listed) == []


def test_the_loader_setting_starts_ptxas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where no loader is in its usual place, as on NixOS, ptxas is started by the one that is named; a wrong one is what fails."""
    monkeypatch.setenv(settings.LOADER, "/no/loader")
    (tmp_path / "x.ptx").write_text("")
    with pytest.raises(BuildError, match="cannot run ptxas: No such file or directory"):
        ptxas.assemble(toolchain.obtain((toolchain.DEVICE,)).ptxas, tmp_path / "x.ptx", tmp_path / "x.cubin", "90a", ())
