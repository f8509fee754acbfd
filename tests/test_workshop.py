"""The workshop's own files: pins, licence, what may not stand in them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
PINS = [
    Requirement(line)
    for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    if line and not line.startswith("#")
]
EXTRAS = [text for extra in PROJECT["optional-dependencies"].values() for text in extra]


@pytest.mark.parametrize("text", [*PROJECT["dependencies"], *EXTRAS])
def test_every_dependency_is_pinned_within_its_bounds(text: str) -> None:
    """constraints.txt pins each dependency to one version (per Python) that pyproject.toml allows."""
    wanted = Requirement(text)
    pins = [pin for pin in PINS if canonicalize_name(pin.name) == canonicalize_name(wanted.name)]
    assert pins
    for pin in pins:
        (specifier,) = pin.specifier
        assert specifier.operator == "=="
        assert wanted.specifier.contains(specifier.version)


def test_pins_are_pins_only() -> None:
    """constraints.txt has no option lines, addresses or paths: pip's own settings say where from."""
    text = (ROOT / "constraints.txt").read_text("utf-8")
    assert not re.search(r"^\s*-|://|@", text, re.MULTILINE)


def test_lowest_python_is_the_one_promised() -> None:
    """Python 3.10 is the lowest: pyproject.toml says so, and ruff checks the syntax for it."""
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["ruff"]
    assert PROJECT["requires-python"] == ">=3.10"
    assert ruff["target-version"] == "py310"


def test_versions_agree() -> None:
    """The package's version and the project's are one."""
    import preflop

    assert preflop.__version__ == PROJECT["version"]
