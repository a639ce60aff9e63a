"""Runs where the wheel is installed and nothing else: no torch, no driver, no compiler. Prints as JSON what it finds."""

import json
import os
import platform
import sys

import flash_kda
from flash_kda import device_code

needs_torch = ""
try:
    flash_kda.fwd  # noqa: B018
except ImportError as error:
    needs_torch = str(error)
print(
    json.dumps(
        {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "glibc": os.confstr("CS_GNU_LIBC_VERSION"),
            "flash_kda": flash_kda.__version__,
            "cubins": {f"{cubin.unit}/{cubin.arch}": cubin.sha256 for cubin in device_code.embedded()},
            "available": bool(flash_kda.is_available()),
            "reason": device_code.choose().reason,
            "needs_torch": needs_torch,
        }
    )
)
assert "torch" not in sys.modules
assert device_code.embedded()
assert device_code.choose().reason
