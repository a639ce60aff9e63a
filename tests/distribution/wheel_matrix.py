"""cibuildwheel on a local stand-in for the manylinux image; as a program, the record of a build of the whole matrix.

`python tests/distribution/wheel_matrix.py` takes the last commit, keeps nothing of earlier builds but the unpacked toolchain, and writes
records/wheels-MACHINE.json. Run it with nothing else on the machine.
"""

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORDS = Path(__file__).resolve().parent / "records"
if __name__ == "__main__":
    sys.path.append(str(ROOT))

import standins  # noqa: E402

from tools import settings  # noqa: E402
from tools.matrix import MATRIX  # noqa: E402


def build(project: Path, image: str, pythons: "list[str]", out: Path, **variables: str) -> str:
    """The configuration of pyproject.toml for these Pythons, with device code for all architectures. Returns the log."""
    volumes = f"--volume={standins.PYENV}:{standins.PYENV}:ro --volume={settings.cache_root()}:/cache --volume=/etc/ssl/certs:/etc/ssl/certs:ro"
    chosen = {
        "CIBW_BUILD": " ".join(f"cp{version.replace('.', '')}-manylinux_*" for version in pythons),
        "CIBW_CONTAINER_ENGINE": f"podman; create_args: --network=host {volumes}",
        f"CIBW_MANYLINUX_{os.uname().machine.upper()}_IMAGE": image,
        "FLASH_KDA_CUDA_ARCHS": "all",
        "CIBW_ENVIRONMENT": "FLASH_KDA_CACHE_DIR=/cache",
    }
    program = Path(sys.executable).parent / "cibuildwheel"
    return standins.run(str(program), "--platform=linux", f"--output-dir={out}", cwd=project, **chosen, **variables)


def record() -> "dict[str, object]":
    """Builds every Python of matrix.json that the machine has, device code included, and says what came out."""
    from flash_kda import verify

    image, pythons = standins.manylinux(MATRIX.pythons)
    with tempfile.TemporaryDirectory() as folder:
        project, out = Path(folder, "project"), Path(folder, "out")
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(project)], check=True)
        describe = ["git", "describe", "--always", "--abbrev=40", "--dirty"]
        commit = subprocess.run(describe, cwd=project, check=True, capture_output=True, text=True).stdout.strip()
        load, start = os.getloadavg()[0], time.monotonic()
        build(project, image, pythons, out, FLASH_KDA_COMMIT=commit)
        seconds = time.monotonic() - start
        wheels: dict[str, dict[str, object]] = {}
        cubins: dict[str, str] = {}
        for path in sorted(out.glob("*.whl")):
            data = path.read_bytes()
            wheels[path.name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            report = verify.verify(path, project / "device-code.lock")
            found = {f"{code.unit}.{code.arch}": code.sha256 for code in report.code}
            if report.faults or found != (cubins or found):
                raise SystemExit(f"{path.name}: {report.faults or 'its machine code is not that of the wheels before'}")
            cubins = found
        lock = hashlib.sha256((project / "device-code.lock").read_bytes()).hexdigest()
    return {
        "machine": os.uname().machine,
        "cores": os.cpu_count(),
        "load_before": load,
        "seconds": round(seconds),
        "commit": commit,
        "device_code_lock": lock,
        "cubins": cubins,
        "cibuildwheel": importlib.metadata.version("cibuildwheel"),
        "pythons": pythons,
        "not_built": [version for version in MATRIX.pythons if version not in pythons],
        "wheels": wheels,
    }


if __name__ == "__main__":
    RECORDS.mkdir(exist_ok=True)
    target = RECORDS / f"wheels-{os.uname().machine}.json"
    target.write_text(json.dumps(record(), indent=2) + "\n")
    print(target)
