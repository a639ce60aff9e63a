"""docker/: built with buildah on local stand-ins for the bases, twice, to the same digest; and run with nothing allowed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import standins
from proof import Table
from test_containers import LOCKED_UP

from tools import ROOT, locks, pins, toolchain
from tools.matrix import MATRIX
from tools.process import capture

containers = pytest.mark.skipif(bool(standins.missing()), reason=standins.missing() or "containers can be run")
# Machine code of all settings would be compiled twice; that of one shows as much. FLASH_KDA_TEST_SETTING=all takes all.
SETTING = os.environ.get("FLASH_KDA_TEST_SETTING", "90a")


@pytest.fixture(scope="module")
def toolchain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toolchain.fetch_all(tmp_path_factory.mktemp("toolchain"))[0].parent


def build(target: str, context: Path, toolchain_folder: Path, *options: str) -> str:
    """Build a target as docker/Dockerfile says, without network and without what an earlier build left; returns the digest."""
    builder = standins.debian("bookworm", "git", "python3", "python3-dev", "python3-distutils", "python3-venv")
    arguments = {
        "BUILDER_BASE": builder,
        "RUNTIME_BASE": standins.debian("bookworm", "python3"),
        "DEV_BASE": builder,
        "PYTHONS": "/usr/bin/python3",
        "FLASH_KDA_CUDA_ARCHS": SETTING,
        "TORCH_REQUIREMENTS": "/dev/null",
    }
    command = ["buildah", "build", "--no-cache", "--format=oci", "--timestamp=315532800", "--network=none", "--quiet"]
    command += [f"--build-arg={name}={value}" for name, value in arguments.items()]
    command += [
        f"--build-context=toolchain={toolchain_folder}",
        "--file=docker/Dockerfile",
        f"--target={target}",
        *options,
    ]
    standins.run(*command, f"--tag=localhost/flash-kda:{target}", ".", cwd=context)
    inspected = ("buildah", "inspect", "--type=image", "--format={{.FromImageDigest}}", f"localhost/flash-kda:{target}")
    return standins.run(*inspected).strip()


def run(target: str, *command: str) -> "subprocess.CompletedProcess[str]":
    arguments = ["podman", "run", "--rm", *LOCKED_UP, f"localhost/flash-kda:{target}", *command]
    return capture(arguments, env=standins.environment())


@containers
def test_the_runtime_image(tree: Path, toolchain_folder: Path, tmp_path: Path, proof: Table) -> None:
    """Equal digests from two folders, in one of which only its owner may read; then the doctor as its default command."""
    digest = build("runtime", tree, toolchain_folder)
    other = tmp_path / "another folder"
    tree.rename(other)
    standins.run("chmod", "-R", "go-rwx", str(other))
    assert build("runtime", other, toolchain_folder) == digest

    result = run("runtime")
    assert result.returncode == 4, result.stdout + result.stderr
    assert "verdict     INCOMPLETE: the installation is in order, but torch >= 2.4 is needed" in result.stdout
    archs = json.loads(run("runtime", "archs", "--json").stdout)
    cubins = {f"{cubin['unit']}/{cubin['arch']}": cubin["sha256"] for cubin in archs["cubins"]}
    proof.add_cubins("image, buildah", cubins)
    assert {key.split("/")[1] for key in cubins} == set(MATRIX.archs if SETTING == "all" else SETTING.split(","))
    (about,) = json.loads(standins.run("podman", "image", "inspect", "localhost/flash-kda:runtime"))
    assert about["User"] == "10001:10001"
    assert about["Config"]["Cmd"] == ["doctor"]
    assert about["Labels"]["flash_kda.cuda_archs"] == SETTING
    assert f'version = "{about["Labels"]["org.opencontainers.image.version"]}"' in (ROOT / "pyproject.toml").read_text()
    listing = standins.run(
        "podman",
        "run",
        "--rm",
        "--user=0",
        "--entrypoint=find",
        "localhost/flash-kda:runtime",
        "/opt",
        "-name",
        "*.pyc",
    )
    assert listing == ""


@containers
def test_the_development_image_has_the_toolchain(tree: Path, toolchain_folder: Path) -> None:
    build("dev", tree, toolchain_folder)
    command = "cd /usr && python3 -m pip --version && ls $FLASH_KDA_TOOLCHAIN_DIR | wc -l"
    result = run("dev", "sh", "-c", command)
    assert result.stdout.startswith(f"pip {locks.read_toolchain_lock()['pip'].version} "), result.stdout + result.stderr
    assert result.stdout.split()[-1] == str(len(locks.read_toolchain_lock()))


@containers
def test_a_package_that_the_base_does_not_have_is_not_taken_from_anywhere(tree: Path) -> None:
    """A base that is neither Debian nor Ubuntu, and lacks something, ends the build in one line."""
    script = "sed -i 's/^ID=.*/ID=other/' /usr/lib/os-release && sh /install 20261101T000000Z python3 no-such-package"
    volume = f"--volume={tree / 'docker' / 'install-packages'}:/install:ro"
    image = standins.debian("bookworm", "python3")
    result = capture(
        ["podman", "run", "--rm", "--network=none", volume, image, "sh", "-c", script], env=standins.environment()
    )
    assert result.returncode == 1
    assert (
        result.stderr.strip() == "install-packages: the base is neither Debian nor Ubuntu, and has no no-such-package"
    )


@containers
def test_the_bake_file_is_one_that_buildx_reads() -> None:
    program = standins.started(standins.trixie("docker-buildx"), "usr/libexec/docker/cli-plugins/docker-buildx")
    result = capture(
        [*program, "bake", "--file=docker/docker-bake.json", "--print", "runtime", "wheels", "dev"], cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
    targets = json.loads(result.stdout)["target"]
    for setting in MATRIX.settings:
        assert targets[f"runtime-{setting}"]["args"]["FLASH_KDA_CUDA_ARCHS"] == setting
        assert targets[f"runtime-{setting}"]["target"] == "runtime"
        assert targets[f"wheels-{setting}"]["args"]["PYTHONS"].count("/bin/python") == len(MATRIX.pythons)
    assert all(target["args"]["SOURCE_DATE_EPOCH"] == "315532800" for target in targets.values())


@pytest.mark.parametrize("command", [["hadolint", "docker/Dockerfile"], ["shellcheck", "docker/build-wheels", "docker/fetch-toolchain", "docker/install-packages", "tests/distribution/install-debian.sh", ".ci/run"]])  # fmt: skip
def test_the_recipes_are_clean(command: "list[str]") -> None:
    result = capture([str(Path(sys.executable).parent / command[0]), *command[1:]], cwd=ROOT)
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


def test_torch_is_pinned_with_all_that_it_needs() -> None:
    """The format is that of a lock; a line without a hash is refused by pip as it is here."""
    requirements = locks.read_toolchain_lock(pins.TORCH)
    assert "torch" in requirements
    assert all(requirements[name].hashes for name in requirements)
    assert len(requirements["torch"].hashes) == len(MATRIX.machines)


def test_every_base_has_a_tag_and_a_digest() -> None:
    for reference in MATRIX.images.values():
        assert re.fullmatch(r"[\w.-]+\.\w+/[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}", reference), reference
