"""Containers on a machine that can reach no image registry: local stand-ins for base images, made from Debian packages.

Needs root, podman, buildah, runc and mmdebstrap; missing() says what is not there.
"""

import functools
import hashlib
import os
import platform
import resource
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STORE = ROOT / "build" / "standins"
PROGRAMS = ("podman", "buildah", "runc", "mmdebstrap", "qemu-aarch64-static")


def missing() -> str:
    """Why no container can be run here; empty if one can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"not installed: {' '.join(absent)} (tests/distribution/install-debian.sh)"
    return "" if os.geteuid() == 0 else "containers are run as root"


@functools.cache
def environment() -> "dict[str, str]":
    """The surroundings in which podman and buildah run in a plain container or virtual machine: no systemd, no bridge network."""
    STORE.mkdir(parents=True, exist_ok=True)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    config = STORE / "containers.conf"
    config.write_text(
        f'[containers]\nnetns = "host"\ndefault_ulimits = ["nofile={files}:{files}", "nproc=4096:4096"]\n'
        '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
    )
    return {**os.environ, "CONTAINERS_CONF": str(config)}


def run(*command: str, cwd: Path = ROOT, **variables: str) -> str:
    """Run podman, buildah or mmdebstrap; returns what it printed. A failure shows all of it."""
    result = subprocess.run(
        command,
        cwd=cwd,
        env={**environment(), **variables},
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if result.returncode != 0:
        raise AssertionError(f"{' '.join(command)} ended with {result.returncode}\n{result.stdout}{result.stderr}")
    return result.stdout


def debian(release: str, *packages: str) -> str:
    """Name of a local image: a minimal Debian of `release` with `packages`."""
    name = "-".join((release, hashlib.sha256(" ".join(packages).encode()).hexdigest()[:8]))
    image = f"localhost/flash-kda-standin:{name}"
    if subprocess.run(["podman", "image", "exists", image], env=environment(), check=False).returncode == 0:
        return image
    archive = STORE / f"{name}.tar"
    if not archive.exists():
        part = STORE / f".part-{name}.tar"
        # An unstable release on a mirror that lags behind has run out of its time of validity; its signature still counts.
        command = ["mmdebstrap", "--quiet", '--aptopt=Acquire::Check-Valid-Until "false"', "--variant=minbase"]
        run(
            *command,
            f"--include={','.join(('ca-certificates', *packages))}",
            release,
            str(part),
            SOURCE_DATE_EPOCH="315532800",
        )
        part.replace(archive)
    run("podman", "import", "--quiet", str(archive), image)
    return image


def trixie(*packages: str) -> Path:
    """Root of a tree with programs of Debian 13, unpacked and not installed."""
    root = STORE / f"trixie-{'-'.join(packages)}"
    if not root.exists():
        archive, part = STORE / f".part-{root.name}.tar", STORE / f".part-{root.name}"
        run("mmdebstrap", "--quiet", "--variant=extract", f"--include={','.join(packages)}", "trixie", str(archive))
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        run("tar", "-xf", str(archive), "-C", str(part))
        archive.unlink()
        part.rename(root)
    return root


def started(root: Path, program: str) -> "list[str]":
    """Command that starts a program of such a tree with the tree's own loader and libraries."""
    libraries = root / "usr" / "lib" / f"{platform.machine()}-linux-gnu"
    loader = next(libraries.glob("ld-linux*.so.*"))
    return [str(loader), "--library-path", str(libraries), str(root / program)]


def foreign_python(architecture: str, release: str, python: str) -> Path:
    """Root of a tree with a Debian Python of another machine, unpacked and not installed, for qemu's user emulation."""
    root = STORE / f"{architecture}-{release}"
    if not (root / "usr" / "bin" / python).exists():
        part = STORE / f".part-{root.name}.tar"
        run(
            "mmdebstrap",
            "--quiet",
            "--variant=extract",
            f"--architectures={architecture}",
            f"--include={python}-minimal,lib{python}-stdlib,libgcc-s1",
            release,
            str(part),
        )
        root.mkdir(exist_ok=True)
        run("tar", "-xf", str(part), "-C", str(root))
        part.unlink()
    return root


PYENV = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()


def manylinux(versions: "list[str]") -> "tuple[str, list[str]]":
    """A stand-in for a manylinux image: /opt/python/cpXY-cpXY with pip. Returns its name and those of `versions` that it has.

    They are environments of Debian's newest Python and of those that pyenv has built on this machine; PYENV must be mounted where it is.
    The image's glibc is new, which does no harm: the compiler that we pin brings the libc that is linked against.
    """
    libraries = ("libssl3t64", "libffi8", "libsqlite3-0", "libreadline8t64", "libbz2-1.0", "zlib1g", "liblzma5")
    base = debian("sid", "python3.14-dev", "python3.14-venv", *libraries)
    found = {"3.14": "python3.14"}
    for folder in PYENV.glob("versions/3.*"):
        found.setdefault(".".join(folder.name.split(".")[:2]), f"{folder}/bin/python3")
    have = [version for version in versions if version in found]
    lines = [f"FROM {base}", "ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt", "RUN mkdir -p /opt/python"]
    for version in have:
        tag = "cp" + version.replace(".", "")
        lines.append(f"RUN {found[version]} -m venv /opt/python/{tag}-{tag}")
    image = "localhost/flash-kda-standin:manylinux"
    recipe = STORE / "manylinux.containerfile"
    recipe.write_text("\n".join(lines) + "\n")
    run(
        "buildah",
        "build",
        "--quiet",
        "--layers",
        f"--volume={PYENV}:{PYENV}:ro",
        f"--file={recipe}",
        f"--tag={image}",
        str(STORE),
    )
    return image, have
