"""The wheel under test: the one that `python3 -m tools test` built and installed, or one built now."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
if importlib.util.find_spec("tools") is None:
    # At the end: an installed flash_kda comes before the one in the tree.
    sys.path.append(str(REPOSITORY))

sys.path.insert(0, str(REPOSITORY / "tests" / "distribution"))  # for standins and proof

from proof import Table  # noqa: E402

from tools import wheels  # noqa: E402
from tools.toolchain import DEVICE, HOST, WHEEL, Toolchain, obtain  # noqa: E402


@pytest.fixture(scope="session")
def wheel_path() -> Path:
    given = os.environ.get("FLASH_KDA_TEST_WHEEL")
    return Path(given) if given else wheels.release("all", REPOSITORY / "dist")


@pytest.fixture(scope="session")
def wheel(wheel_path: Path) -> wheels.Wheel:
    return wheels.read_wheel(wheel_path)


@pytest.fixture(scope="session")
def full_toolchain() -> Toolchain:
    return obtain((DEVICE, HOST, WHEEL))


@pytest.fixture
def project(tree: Path, full_toolchain: Toolchain, wheel_path: Path) -> Path:
    """The sources in a folder of their own, with the cubins that were compiled before: they are the same for every Python."""
    shutil.copytree(REPOSITORY / "build" / "device", tree / "build" / "device")
    return tree


TABLE = Table()


@pytest.fixture(scope="session")
def proof() -> Table:
    """What each route has built; printed at the end of the tests."""
    return TABLE


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if TABLE.routes:
        terminalreporter.section("the same machine code by every route")
        for line in TABLE.lines():
            terminalreporter.line(line)
