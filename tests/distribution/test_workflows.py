""".github/: the linters that know its faults are content, every action is pinned, and the matrix is that of matrix.json."""

import json
import re
import sys
from pathlib import Path

import pytest

from tools import ROOT, locks, sbom
from tools.matrix import MATRIX
from tools.process import capture

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def program(name: str) -> str:
    return str(Path(sys.executable).parent / name)


@pytest.mark.parametrize(
    "command",
    [
        ["actionlint", "-shellcheck", program("shellcheck"), *map(str, WORKFLOWS)],
        ["zizmor", "--offline", "--quiet", "--no-progress", "--persona", "pedantic", str(ROOT / ".github")],
    ],
    ids=["actionlint", "zizmor"],
)
def test_linters_are_content(command: "list[str]") -> None:
    result = capture([program(command[0]), *command[1:]], cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_zizmor_would_object(tmp_path: Path) -> None:
    """To an action that a tag names, and to text of strangers in a script."""
    folder = tmp_path / ".github" / "workflows"
    folder.mkdir(parents=True)
    text = (ROOT / ".github" / "workflows" / "check.yml").read_text()
    text = re.sub(r"checkout@\w+ # v5\.0\.0", "checkout@v5", text)
    (folder / "check.yml").write_text(re.sub("run: sudo env .*", "run: echo ${{ github.head_ref }}", text))
    result = capture([program("zizmor"), "--offline", "--no-progress", str(tmp_path)])
    assert result.returncode != 0
    assert "unpinned-uses" in result.stdout
    assert "template-injection" in result.stdout


def test_every_action_is_pinned_by_commit_and_the_same_everywhere() -> None:
    pins: dict[str, set[str]] = {}
    for path in WORKFLOWS:
        for action, version in re.findall(r"uses: (\S+)@(\S+ # v[\d.]+)$", path.read_text(), re.MULTILINE):
            pins.setdefault(action, set()).add(version)
    assert len(pins) >= 5
    assert all(
        len(versions) == 1 and re.fullmatch(r"[0-9a-f]{40} # v\d+\.\d+\.\d+", *versions) for versions in pins.values()
    )
    uses = sum(len(re.findall(r"uses: (?![.$]/)", path.read_text())) for path in WORKFLOWS)
    pinned = sum(len(re.findall(r"uses: \S+@[0-9a-f]{40} # v", path.read_text())) for path in WORKFLOWS)
    assert uses == pinned


def test_the_matrix_of_the_workflows() -> None:
    wheels, images = ((ROOT / ".github" / "workflows" / f"{name}.yml").read_text() for name in ("wheels", "images"))
    assert f"machine: [{', '.join(MATRIX.machines)}]" in wheels
    for text in (wheels, images):
        assert "jq -c .settings matrix.json" in text
        assert "setting: ${{ fromJSON(needs.plan.outputs.settings) }}" in text


def test_the_bill_of_materials() -> None:
    bill = json.loads(sbom.bill())
    assert sbom.bill() == sbom.bill()
    names = {component["name"] for component in bill["components"]}
    assert names == {*locks.read_toolchain_lock(), *(f"{name}.cubin" for name in locks.read_device_code_lock())}
    references = [component["bom-ref"] for component in bill["components"]]
    assert len(set(references)) == len(references)
    assert set(sbom.EMBEDDED) <= set(locks.read_toolchain_lock())
    project = (ROOT / "pyproject.toml").read_text()
    assert f'license = "{bill["metadata"]["component"]["licenses"][0]["expression"]}"' in project
