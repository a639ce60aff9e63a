"""The record of a build of the whole matrix, held to matrix.json. Device code may have changed since: the record says what it saw."""

import json
import re

import pytest
from wheel_matrix import RECORDS

from tools.matrix import MATRIX

RECORD = json.loads((RECORDS / "wheels-x86_64.json").read_text())


def test_every_python_has_its_wheel() -> None:
    assert RECORD["pythons"] + RECORD["not_built"] == MATRIX.pythons
    assert set(RECORD["not_built"]) <= {"3.14t"}, "docs/install.md says that only this one was never built"
    built = [match[1] for name in RECORD["wheels"] if (match := re.search(r"-cp3\d+-(cp3\d+t?)-manylinux", name))]
    assert sorted(built) == sorted("cp" + version.replace(".", "") for version in RECORD["pythons"])


def test_the_whole_matrix_takes_less_than_15_minutes_on_two_cores() -> None:
    assert RECORD["cores"] <= 2
    assert 0 < RECORD["seconds"] < 15 * 60


@pytest.mark.parametrize("arch", MATRIX.archs)
def test_the_record_names_machine_code_for_every_architecture(arch: str) -> None:
    digests = [sha256 for cubin, sha256 in RECORD["cubins"].items() if cubin.endswith(f".{arch}")]
    assert digests
    assert all(re.fullmatch("[0-9a-f]{64}", sha256) for sha256 in digests)
