"""Reads what a shared library asks of a system, and the CUDA binaries that lie in it. 64-bit little-endian ELF, nothing else.

Format: System V ABI, chapters 4 and 5; symbol versions as in the LSB; EM_CUDA as ``cuobjdump`` and ``readelf`` show it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little-endian
MACHINES = {3: "i686", 21: "ppc64le", 22: "s390x", 40: "armv7l", 62: "x86_64", 183: "aarch64", 243: "riscv64"}
_CUDA = 190

_LOAD, _DYNAMIC, _GNU_STACK = 1, 2, 0x6474E551  # types of segments
_NEEDED, _STRTAB, _RPATH, _RUNPATH, _VERNEED = 1, 5, 15, 29, 0x6FFFFFFE  # tags of dynamic entries


class Library:
    """A shared library. Raises ValueError for anything else."""

    def __init__(self, data: bytes) -> None:
        if data[:6] != MAGIC:
            raise ValueError("not a 64-bit little-endian ELF file")
        self._data = data
        self.machine = MACHINES.get(self._number(18, 2), f"ELF machine {self._number(18, 2)}")
        start, size, count = self._number(32, 8), self._number(54, 2), self._number(56, 2)
        if start + size * count > len(data):
            raise ValueError("the file is cut off: its segments lie beyond its end")
        self._segments = [start + index * size for index in range(count)]
        self._dynamic: list[tuple[int, int]] = []
        for segment in self._segments:
            if self._number(segment, 4) == _DYNAMIC:
                offset, length = self._number(segment + 8, 8), self._number(segment + 32, 8)
                self._dynamic = [
                    (self._number(at, 8), self._number(at + 8, 8))
                    for at in range(offset, min(offset + length, len(data)), 16)
                ]

    @property
    def needed(self) -> list[str]:
        """Libraries that the loader opens with this one."""
        return self._strings(_NEEDED)

    @property
    def run_path(self) -> list[str]:
        """Folders that the loader searches for them."""
        return [part for text in self._strings(_RPATH) + self._strings(_RUNPATH) for part in text.split(":") if part]

    @property
    def executable_stack(self) -> bool:
        return any(self._number(s, 4) == _GNU_STACK and self._number(s + 4, 4) & 1 for s in self._segments)

    @property
    def versions(self) -> dict[str, list[str]]:
        """Symbol versions that each library must have: {"libc.so.6": ["GLIBC_2.14", ...]}."""
        table = dict(self._dynamic)
        found: dict[str, list[str]] = {}
        at = self._offset(table[_VERNEED]) if _VERNEED in table else 0
        step = at
        while step:
            auxiliary, names = at + self._number(at + 8, 4), []
            for _ in range(self._number(at + 2, 2)):
                names.append(self._string(self._number(auxiliary + 8, 4)))
                auxiliary += self._number(auxiliary + 12, 4)
            found[self._string(self._number(at + 4, 4))] = names
            step = self._number(at + 12, 4)
            at += step
        return found

    @property
    def glibc(self) -> tuple[int, int]:
        """The oldest glibc that has all symbols; (0, 0) if none is asked for."""
        names = [name for versions in self.versions.values() for name in versions if name.startswith("GLIBC_2.")]
        return max(((2, int(name.split(".")[1])) for name in names), default=(0, 0))

    def _number(self, offset: int, size: int) -> int:
        return int.from_bytes(self._data[offset : offset + size], "little")

    def _offset(self, address: int) -> int:
        """Where in the file an address is."""
        for segment in self._segments:
            if self._number(segment, 4) == _LOAD:
                start, size = self._number(segment + 16, 8), self._number(segment + 32, 8)
                if start <= address < start + size:
                    return self._number(segment + 8, 8) + address - start
        raise ValueError(f"address {address:#x} is in no segment of the file")

    def _string(self, index: int) -> str:
        at = self._offset(dict(self._dynamic)[_STRTAB]) + index
        return self._data[at : self._data.index(b"\0", at)].decode(errors="replace")

    def _strings(self, tag: int) -> list[str]:
        return [self._string(value) for key, value in self._dynamic if key == tag]


class Image(NamedTuple):
    """A CUDA binary found in a file: its bytes, and the number in the sm_<number> that it says it is for."""

    data: bytes
    sm: int


def cubins(data: bytes) -> Iterator[Image]:
    """The CUDA binaries that lie uncompressed in ``data``, each cut out by what its own header says of its length."""
    at = data.find(MAGIC)
    while at >= 0:
        if int.from_bytes(data[at + 18 : at + 20], "little") == _CUDA:

            def number(offset: int, size: int, at: int = at) -> int:
                return int.from_bytes(data[at + offset : at + offset + size], "little")

            # ptxas writes the two tables of headers last.
            size = max(number(40, 8) + number(58, 2) * number(60, 2), number(32, 8) + number(54, 2) * number(56, 2))
            flags, abi_version = number(48, 4), number(8, 1)
            yield Image(data[at : at + size], flags & 0xFF if abi_version < 8 else flags >> 8 & 0xFF)
        at = data.find(MAGIC, at + 1)
