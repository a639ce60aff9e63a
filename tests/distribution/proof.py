"""The proof that all routes give the same: a table of what each of them built, and a comparison that explains a difference."""

import hashlib
import shutil
from pathlib import Path

from flash_kda import verify
from tools import ROOT, locks
from tools.process import capture


class Table:
    """Machine code by route. A route that built something else than device-code.lock ends its test at once."""

    def __init__(self) -> None:
        self.routes: dict[str, dict[str, str]] = {}

    def add(self, route: str, wheel: Path) -> None:
        """Read a wheel that a route has built; compared is what lies in the file, not what it says of itself."""
        report = verify.verify(wheel, ROOT / "device-code.lock")
        assert report.faults == []
        self.add_cubins(route, {f"{code.unit}/{code.arch}": code.sha256 for code in report.code})

    def add_cubins(self, route: str, cubins: "dict[str, str]") -> None:
        locked = {key: cubin["sha256"] for key, cubin in locks.read_device_code_lock().items()}
        assert cubins, "a route without machine code proves nothing"
        assert cubins == {key: locked[key] for key in cubins}
        self.routes[route] = cubins

    def lines(self) -> "list[str]":
        """Route x architecture x sha256, and in how many ways each cubin was made."""
        found = [f"{'route':<34}{'cubin':<16}sha256"]
        for route, cubins in self.routes.items():
            for key in sorted(cubins):
                found.append(f"{route:<34}{key:<16}{cubins[key]}")
        for key in sorted(locks.read_device_code_lock()):
            digests = {cubins[key] for cubins in self.routes.values() if key in cubins}
            routes = sum(key in cubins for cubins in self.routes.values())
            found.append(
                f"{'all routes':<34}{key:<16}{routes} routes, {len(digests)} digest{'s' * (len(digests) != 1)}"
            )
        return found


def assert_same(one: Path, other: Path) -> None:
    """Fails if two files differ in a byte, with diffoscope's report of what it is where there is one."""
    first, second = (hashlib.sha256(path.read_bytes()).hexdigest() for path in (one, other))
    if first != second:
        report = f"{one.name}: sha256 {first} and {second}"
        if shutil.which("diffoscope"):
            report += (
                "\n" + capture(["diffoscope", "--text=-", "--max-text-report-size=20000", str(one), str(other)]).stdout
            )
        raise AssertionError(report)
