"""Every code block of README, the documentation and the skill is run, or says why it cannot be.

Python blocks of one page run one after the other, with one set of names; commands (sh) run in an empty folder. A block that cannot run
stands below a comment, ``<!-- not run: why -->``. Blocks that are called text, and indented ones, hold formulas and output.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "skills").rglob("*.md")],
    key=lambda path: path.relative_to(ROOT).as_posix(),
)
COMMENT = re.compile(r"<!-- not run: (.+?) -->")
FENCE = re.compile(r"(`{3,})(.*)")
INDENTED_COMMAND = re.compile(r" {4,}(?:\$ |(?:[A-Z_]+=\S* )*(?:python3?|pip|pytest|podman|docker|nix|cmake|make) )")
ENDS_WELL = (0, 3)  # of commands: 3 is the doctor where there is no GPU


class Block(NamedTuple):
    language: str
    code: str
    line: int
    why_not: str | None


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page."""
    found: list[Block] = []
    lines = text.splitlines()
    opened: tuple[str, str, int, str | None] | None = None
    for number, line in enumerate(lines, 1):
        fence = FENCE.fullmatch(line.strip())
        if opened is None and fence is not None:
            above = COMMENT.fullmatch(lines[number - 2].strip()) if number > 1 else None
            opened = (fence[1], fence[2].strip(), number, above[1] if above else None)
        elif opened is not None and line.strip() == opened[0]:
            found.append(Block(opened[1], "\n".join(lines[opened[2] : number - 1]) + "\n", opened[2], opened[3]))
            opened = None
    assert opened is None, f"the block of line {opened[2]} never ends" if opened else ""
    return found


def page_id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_blocks_are_of_a_known_kind(page: Path) -> None:
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.language.startswith("{"):  # a directive of the site
            continue
        assert block.language in ("python", "sh", "text"), f"{page.name}:{block.line}: {block.language!r}"
        if block.why_not is not None:
            assert block.language != "text", f"{page.name}:{block.line}: text is never run"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_no_command_hides_in_an_indented_block(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    inside = {block.line + i for block in blocks(text) for i in range(block.code.count("\n") + 1)}
    lines = enumerate(text.splitlines(), 1)
    assert [line for number, line in lines if number not in inside and INDENTED_COMMAND.match(line)] == []


@pytest.mark.filterwarnings("ignore:flash_kda.fwd was called with CPU tensors")
@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_python_runs(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # the examples take a GPU if there is one
    names: dict[str, object] = {"__name__": "page"}
    ran = 0
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.language == "python":
            # What is not run is Python all the same.
            program = compile("\n" * block.line + block.code, str(page), "exec")
            if block.why_not is None:
                exec(program, names)
                ran += 1
    if not ran:
        pytest.skip("no block to run on this page")


def commands() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for block in blocks(page.read_text(encoding="utf-8")):
            if block.language == "sh" and block.why_not is None:
                found += [
                    (page_id(page), line)
                    for line in re.sub(r"\s+#.*", "", block.code).splitlines()
                    if line.strip() and not line.startswith("#")
                ]
    return found


def run(line: str, folder: Path) -> None:
    import flash_kda

    # The package under test and its Python, from another folder.
    here = str(Path(flash_kda.__file__).resolve().parent.parent)
    environment = {**os.environ, "PYTHONPATH": here, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", line], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode in ENDS_WELL, f"{line} ended with {done.returncode}: {done.stdout}{done.stderr}"


@pytest.mark.parametrize("command", sorted({line for _, line in commands()}))
def test_commands_run(command: str, tmp_path: Path) -> None:
    from flash_kda import device_code

    try:
        device_code.native()
    except RuntimeError as error:
        pytest.skip(f"not built: {error}")
    run(command, tmp_path)


# ---- the reader of blocks, and that wrong ones are seen


def test_reading() -> None:
    text = "a\n```python\nx = 1\n```\n<!-- not run: no GPU -->\n```sh\nrm x\n```\n````text\n```\n````\n"
    assert blocks(text) == [
        Block("python", "x = 1\n", 2, None),
        Block("sh", "rm x\n", 6, "no GPU"),
        Block("text", "```\n", 9, None),
    ]
    with pytest.raises(AssertionError, match="never ends"):
        blocks("```python\nx = 1\n")


def test_wrong_blocks_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(text: str, test: object) -> None:
        page = tmp_path / "page.md"
        page.write_text(text)
        test(page, *((monkeypatch, tmp_path) if test is test_python_runs else ()))  # type: ignore[operator]

    with pytest.raises(AssertionError):
        check("```\nx\n```\n", test_blocks_are_of_a_known_kind)
    with pytest.raises(AssertionError):
        check("```bash\nx\n```\n", test_blocks_are_of_a_known_kind)
    for hidden in ("python -m x", "FLASH_KDA_JOBS=1 pip install .", "$ ls"):
        with pytest.raises(AssertionError):
            check(f"as in\n\n    {hidden}\n", test_no_command_hides_in_an_indented_block)
    with pytest.raises(NameError):
        check("```python\nx = 1\n```\n```python\ny = z\n```\n", test_python_runs)
    with pytest.raises(SyntaxError):
        check("<!-- not run: no reason -->\n```python\nx = = 1\n```\n", test_python_runs)
    with pytest.raises(AssertionError, match="ended with 1"):
        run("python -c 'raise SystemExit(1)'", tmp_path)


def test_there_is_something_to_run() -> None:
    assert len(PAGES) > 15
    assert {"python -m flash_kda doctor"} <= {line for _, line in commands()}
