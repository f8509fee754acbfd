"""House rules that a linter does not know, read from the source of the tests and the package."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEST_FILES = sorted((ROOT / "tests").rglob("test_*.py"))
ROOMS = sorted(path.parent for path in (ROOT / "src" / "preflop").glob("*/__init__.py"))
COMMITTED = [
    path
    for folder in ("src", "tests", "docs", "bench", ".ci")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in {"", ".py", ".md", ".toml", ".csv", ".json"}
    and path.is_file()
    and "__pycache__" not in path.parts
]
# Folders of one machine and hosts of one workplace: nobody else has them.
ELSEWHERE = re.compile(r"(?<![\w.])/(?:work|tmp|root|home|opt)/\w|\.\./shared\b")


def undocumented(text: str) -> list[str]:
    """Names of test functions without a docstring."""
    return [
        node.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not ast.get_docstring(node)
    ]


@pytest.mark.parametrize("path", TEST_FILES, ids=lambda path: path.name)
def test_every_test_states_its_fact(path: Path) -> None:
    """Each test function has a docstring: the fact that it holds."""
    assert undocumented(path.read_text("utf-8")) == []


def test_a_silent_test_is_found() -> None:
    """The check can fail."""
    assert undocumented("def test_x():\n    assert True") == ["test_x"]


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_every_room_opens_with_its_three_lines(room: Path) -> None:
    """A room's __init__ says what it is for, what it may import, and what does not belong in it."""
    opening = ast.get_docstring(ast.parse((room / "__init__.py").read_text("utf-8"))) or ""
    assert re.search(r"\bimport", opening), f"{room.name}: does not say what it may import"
    assert re.search(r"(?i)not belong|computes nothing|never|nothing else", opening), room.name


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_names_this_machine(path: Path) -> None:
    """No file of the repository names a folder that only one machine has."""
    if path.name == Path(__file__).name:
        return
    found = ELSEWHERE.search(path.read_text("utf-8", errors="ignore"))
    assert found is None, found
