"""Writes the C++ file through which the host module carries its cubins and the record of the build."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

from flash_kda.device_code import capabilities
from tools import ROOT, settings
from tools.archs import Plan
from tools.device import Cubin
from tools.errors import BuildError, explain
from tools.locks import compare_with_lock
from tools.toolchain import Toolchain
from tools.units import ARCHS


def project_version() -> str:
    """The version, from the one place that states it."""
    with explain("cannot read pyproject.toml"):
        text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    match = re.search(r'^version = "([^"]+)"$', text, re.MULTILINE)
    if not match:
        raise BuildError('pyproject.toml has no line: version = "..."')
    return match[1]


def build_record(plan: Plan, cubins: list[Cubin], toolchain: Toolchain, host: str) -> dict[str, Any]:
    """What the module tells about its making. No time and no path: the same inputs give the same record."""
    record: dict[str, Any] = {
        "version": project_version(),
        "setting": plan.setting,
        "archs": list(plan.archs),
        "toolchain_lock": toolchain.digest,
        "toolchain": {name: toolchain.versions[name] for name in sorted(toolchain.versions)},
        "host_compiler": host,
        "locked": not compare_with_lock([cubin.record() for cubin in cubins]),
        "cubins": [cubin.record() for cubin in cubins],
    }
    return {**record, **settings.commit()}


# The symbols are hidden: nothing of this is exported. The image is aligned, since the driver may read it in place.
_BLOCK = r"""asm(
    ".section .rodata.flash_kda_cubins,\"a\",@progbits\n"
    ".balign 128\n"
    ".globl {symbol}_begin\n.hidden {symbol}_begin\n{symbol}_begin:\n"
    ".incbin \"{file}\"\n"
    ".globl {symbol}_end\n.hidden {symbol}_end\n{symbol}_end:\n"
    ".byte 0\n.text\n");
"""


def write_embedded(cubins: list[Cubin], record: dict[str, Any], folder: Path) -> Path:
    """Lay the cubins and embedded_cubins.cpp into `folder`; the .cpp must be compiled with `folder` as working directory.

    `.incbin` and not an array: a C array of a few megabytes costs the compiler hundreds of megabytes.
    """
    text = json.dumps(record, sort_keys=True)
    if ')json"' in text:
        raise BuildError("the build record holds the delimiter of its C++ literal")
    order = [arch.name for arch in ARCHS]
    cubins = sorted(cubins, key=lambda cubin: (cubin.unit, order.index(cubin.arch)))
    blocks, externs, rows = [], [], []
    for cubin in cubins:
        major, first, last = capabilities(cubin.arch)
        file = f"{cubin.unit}.{cubin.arch}.cubin"
        symbol = f"flash_kda_cubin_{cubin.unit}_{cubin.arch}"
        with explain(f"cannot write into {folder}"):
            shutil.copyfile(cubin.path, folder / file)
        blocks.append(_BLOCK.format(symbol=symbol, file=file))
        externs.append(f"extern const unsigned char {symbol}_begin[], {symbol}_end[];")
        rows.append(
            f'    {{"{cubin.unit}", "{cubin.arch}", {major}, {first}, {last},\n     "{cubin.sha256}",\n'
            f"     {symbol}_begin, {symbol}_end}},"
        )
    newline = "\n"
    source = f"""// Written by tools/embed.py.
#include "host/embedded.h"

{newline.join(blocks)}

extern "C" {{
{newline.join(externs)}
}}

namespace flash_kda {{

const EmbeddedCubin kEmbeddedCubins[] = {{
{newline.join(rows)}
}};
const std::size_t kEmbeddedCubinCount = {len(cubins)};
const char kBuildRecord[] = R"json({text})json";

}}  // namespace flash_kda
"""
    path = folder / "embedded_cubins.cpp"
    with explain(f"cannot write {path}"):
        path.write_text(source, encoding="utf-8")
    return path
