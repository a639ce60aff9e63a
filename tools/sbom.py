"""The bill of materials of a release, in CycloneDX 1.6: what is in the module, what made it, and the digest of every cubin."""

import json
from typing import Any

from tools.embed import project_version
from tools.locks import read_device_code_lock, read_toolchain_lock

# Code of these is compiled into the module or linked to it; the others only make it.
EMBEDDED = {
    "nvidia-cutlass": "BSD-3-Clause",
    "pybind11": "BSD-3-Clause",
    "ziglang": "MIT AND Apache-2.0 WITH LLVM-exception",
}


def bill() -> str:
    """JSON; the same sources give the same text."""
    components: list[dict[str, Any]] = []
    for pin in read_toolchain_lock().values():
        component: dict[str, Any] = {
            "type": "library" if pin.name in EMBEDDED else "application",
            "bom-ref": pin.name,
            "name": pin.name,
            "version": pin.version,
            "purl": f"pkg:pypi/{pin.name}@{pin.version}",
            "scope": "required" if pin.name in EMBEDDED else "excluded",
            # One for each machine that has a wheel of its own.
            "properties": [{"name": "wheel:sha256", "value": digest} for digest in pin.hashes],
        }
        if pin.name in EMBEDDED:
            component["licenses"] = [{"expression": EMBEDDED[pin.name]}]
        components.append(component)
    for name, cubin in read_device_code_lock().items():
        components.append(
            {
                "type": "file",
                "bom-ref": f"cubin:{name}",
                "name": f"{name}.cubin",
                "hashes": [{"alg": "SHA-256", "content": cubin["sha256"]}],
            }
        )
    subject = {
        "type": "library",
        "bom-ref": "flash_kda",
        "name": "flash_kda",
        "version": project_version(),
        "purl": f"pkg:pypi/flash-kda@{project_version()}",
        "licenses": [{"expression": "MIT AND BSD-3-Clause AND Apache-2.0 WITH LLVM-exception"}],
    }
    made_of = [component["bom-ref"] for component in components]
    content = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": subject},
        "components": components,
        "dependencies": [{"ref": "flash_kda", "dependsOn": made_of}],
    }
    return json.dumps(content, indent=2) + "\n"
