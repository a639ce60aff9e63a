"""Reads matrix.json: what is built and released, for whom, and on what. Every route takes these values from it or is checked against it."""

import json
from dataclasses import dataclass

from tools import ROOT
from tools.errors import BuildError

FILE = ROOT / "matrix.json"


@dataclass(frozen=True)
class Matrix:
    """The content of matrix.json."""

    archs: "dict[str, str]"  # name as in sm_<name>: the GPUs it is for; most specific first
    settings: "list[str]"  # of FLASH_KDA_CUDA_ARCHS that wheels, images and flake outputs are made for; the first is the default
    pythons: "list[str]"  # "3.14t": without the global lock
    machines: "list[str]"
    images: "dict[str, str]"  # bases of images and of wheel builds, each with its digest
    nixpkgs: "dict[str, str]"  # rev, narHash


def read() -> Matrix:
    try:
        return Matrix(**json.loads(FILE.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise BuildError(f"matrix.json cannot be read: {error}") from error


MATRIX = read()
