"""The documents: commands in them are run and their output compared, and every command is in them.

In README.md and docs/*.md, a fenced block ```console holds commands after "$ " and, below each, how its
output begins. "..." stands for anything. "# exit status 2" after a command says how it must end. A
comment `<!-- not run: REASON -->` above a block leaves it out.
"""

from __future__ import annotations

import doctest
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from preflop.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
FENCE = re.compile(
    r"(?P<above>(?:<!--[^\n]*-->\n)?)```(?P<kind>\w+)\n(?P<body>.*?)^```", re.DOTALL | re.MULTILINE
)
STATUS = re.compile(r"\s*# exit status (\d+)$")


@dataclass(frozen=True)
class Example:
    """One command of a page and how its output begins."""

    page: str
    command: str
    begins: tuple[str, ...]
    status: int = 0


def blocks(text: str, kind: str) -> list[str]:
    """Bodies of the fenced blocks of a kind that are to be run."""
    return [
        found["body"]
        for found in FENCE.finditer(text)
        if found["kind"] == kind and "not run:" not in found["above"]
    ]


def examples(page: str, text: str) -> list[tuple[Example, ...]]:
    """Commands of each of a page's console blocks."""
    return [
        tuple(_example(page, part) for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:])
        for body in blocks(text, "console")
    ]


def _example(page: str, part: str) -> Example:
    line, *output = part.rstrip("\n").split("\n")
    status = STATUS.search(line)
    begins = tuple(output) if any(output) else ()
    return Example(page, STATUS.sub("", line), begins, int(status[1]) if status else 0)


def differs(begins: tuple[str, ...], printed: str) -> str:
    """Why the output does not begin like that; empty where it does. Runs of blanks are as one."""
    wanted = [" ".join(line.split()) for line in begins]
    got = [" ".join(line.split()) for line in printed.splitlines()]
    if wanted == got[: len(wanted)]:
        return ""
    want, have = "\n".join([*wanted, "..."]) + "\n", "\n".join([*got, "", ""]) + "\n"
    if doctest.OutputChecker().check_output(want, have, doctest.ELLIPSIS):
        return ""
    return f"expected to begin:\n{want}\nprinted:\n{printed}"


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run one documented command: preflop as installed here, output 100 columns wide, no colours."""
    words = shlex.split(command)
    assert words[0] == "preflop", f"only preflop is run from the documents, not {words[0]!r}"
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", "from preflop.cli.main import main; main()", *words[1:]],
        cwd=folder, env=environment, check=False, timeout=600, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


ALL = [block for page in PAGES for block in examples(page.name, page.read_text("utf-8"))]


@pytest.mark.parametrize("block", ALL, ids=lambda block: f"{block[0].page}: {block[0].command}")
def test_documented_commands(block: tuple[Example, ...], tmp_path: Path) -> None:
    """Commands in the documents end as they say there, and their output begins as it is shown.

    Those of one block run one after the other in one folder.
    """
    for example in block:
        done = run(example.command, tmp_path)
        assert done.returncode == example.status, done.stdout
        assert differs(example.begins, done.stdout) == "", example.command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documented_python(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python blocks of a page run, one after the other, in one namespace."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__docs__"}
    for body in blocks(page.read_text("utf-8"), "python"):
        exec(compile(body, page.name, "exec"), names)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_documented(command: str) -> None:
    """Each command of `preflop` appears in README.md or docs/ as `preflop NAME`."""
    pages = "\n".join(page.read_text("utf-8") for page in PAGES)
    assert re.search(rf"\bpreflop {command}\b", pages)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    """A relative link names a file of the repository."""
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text("utf-8"))
    missing = [
        t
        for t in targets
        if "://" not in t and not t.startswith("mailto:") and not (page.parent / t).exists()
    ]
    assert missing == []


@pytest.mark.parametrize("marker", ["run-command", "test-command"])
def test_readme_has_the_two_commands(marker: str) -> None:
    """The README's two commands stand below their markers, where .ci/run finds them."""
    text = (ROOT / "README.md").read_text("utf-8")
    found = re.search(rf"<!-- {marker} -->\s*```\w*\n(.+?)\n```", text, re.DOTALL)
    assert found, f"README.md has no fenced command below <!-- {marker} -->"
    assert found[1].startswith("python3 -m venv")


def test_readme_is_run() -> None:
    """The README shows at least one real output, and it is compared."""
    assert any(example.page == "README.md" and example.begins for block in ALL for example in block)


# ---- the mechanism itself ---------------------------------------------------------------------------

PAGE = """
```console
$ preflop time --params 7B
43 days
...
$ preflop dtypes x # exit status 2
```
<!-- not run: needs a GPU -->
```console
$ preflop calibrate
```
"""


def test_blocks_are_read() -> None:
    """Commands, outputs and statuses are found; a block marked `not run` is left out."""
    assert examples("p", PAGE) == [
        (
            Example("p", "preflop time --params 7B", ("43 days", "...")),
            Example("p", "preflop dtypes x", (), 2),
        )
    ]


@pytest.mark.parametrize(
    ("begins", "printed", "same"),
    [
        (("a", "b"), "a \nb\nc\n", True),
        (("a", "b"), "a\nc\n", False),
        (("a", "...", "z"), "a\nb\nc\nz\nrest\n", True),
        (("a ... c",), "a b c\n", True),
        (("a",), "", False),
        ((), "anything", True),
    ],
)
def test_outputs_are_compared(begins: tuple[str, ...], printed: str, same: bool) -> None:
    """An output begins as shown or it does not: the comparison can fail."""
    assert (differs(begins, printed) == "") is same


def test_a_command_that_fails_is_seen(tmp_path: Path) -> None:
    """The runner reports exit statuses: an unknown command is 2."""
    assert run("preflop nonsense", tmp_path).returncode == 2
