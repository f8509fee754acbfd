"""Who may import whom (docs/architecture.md, "Rules between rooms"), read from the source.

Each rule is a function from sources to complaints, so that a planted fault can show that it complains.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "preflop"

TORCH_ROOMS = {"record", "models", "measure", "trainer", "integrations"}
# Modules of rooms without torch: one makes the tapes that ship, the other has models that others measured.
# They are imported by functions that need them, when they are called.
TORCH_MODULES = {
    "preflop.tapes.build",
    "preflop.published.litgpt",
    "preflop.published.megatron",
    "preflop.published.selective",
    "preflop.published.bert",
    "preflop.published.staff",
}
# Outside of them torch may be imported by a function, when it is called, in these files only.
TORCH_WHEN_CALLED = {"api", "subject", "huggingface", "huggingface_batch", "cli", "published"}
# Slow to import: never at the top of a module, so that commands that need none of them start quickly.
HEAVY = {"torch", "transformers", "matplotlib", "jinja2", "ml_dtypes", "rich", "numpy", "einops", "jaxtyping"}
HEAVY_ROOMS = TORCH_ROOMS
# Rooms that are only imported by functions when they are called, and work on arrays throughout.
NUMPY_MODULES = {"preflop.ledgers.memory"}

# What stands under everything: names, numbers and words.
LEAVES = {"axes", "units", "errors", "quantity", "files", "strides", "collection"}
FACTS = {"precision", "optimizers", "dtypes", "recomputation"}
COUNTS = {"tape", "ops", "ledgers", "account"}
# Room -> the rooms it may import, beside itself and the leaves. Imports point left along the law:
# subject -> record -> tape -> transforms -> ledgers -> timing -> plan -> report.
MAY_IMPORT: dict[str, set[str]] = {
    "axes": set(),
    "units": set(),
    "errors": set(),
    "quantity": set(),
    "files": set(),
    "strides": set(),
    "collection": set(),
    "precision": set(),
    "optimizers": set(),
    "dtypes": set(),
    "recomputation": set(),
    "tape": set(),
    "ops": {"tape"},
    "account": {"tape"},
    "ledgers": COUNTS,
    "transforms": {"tape", "ops", "recomputation"},
    "formulas": set(),
    "hardware": set(),
    # Where a tape meets a device's allocator.
    "device_memory": COUNTS | {"hardware"},
    # What `gpus=` and `shard=` say, applied to a tape.
    "sharing": {"tape", "transforms", "optimizers"},
    "timing": COUNTS | FACTS | {"formulas", "hardware"},
    "plan": COUNTS | FACTS | {"formulas", "hardware", "timing", "transforms"},
    "accounting": COUNTS | FACTS | {"formulas", "hardware", "device_memory", "timing", "plan", "report"},
    "report": COUNTS | FACTS | {"formulas", "hardware", "timing", "plan", "models", "accounting", "measure"},
    "models": set(),
    "huggingface": {"subject", "models", "huggingface_batch"},
    "huggingface_batch": set(),
    "subject": FACTS | {"models", "huggingface"},
    # ops: which kernel a call would take; hardware: what the target can run.
    "record": FACTS | {"subject", "tape", "models", "ops", "hardware"},
    # Where recording meets the transforms: one block of a stack repeated, a few sizes fitted.
    "folding": {"subject", "record", "tape", "transforms"},
    "parametric": {"subject", "record", "folding", "tape", "transforms"},
    "real_steps": {"subject", "record", "tape"},
    "choosing": COUNTS
    | FACTS
    | {"subject", "models", "plan", "tapes", "parametric", "accounting", "api", "transforms", "hardware"}
    # timing: which rules this machine's calibration records by; record and folding: when asked for what does
    # not follow from a tape that is there.
    | {"timing", "record", "folding"},
    "fitting": COUNTS
    | {"subject", "models", "plan", "tapes", "folding", "record", "accounting", "api", "transforms"}
    | {"hardware", "timing", "huggingface"},
    "tapes": FACTS | {"subject", "tape", "transforms", "models", "hardware", "record", "parametric"},
    "measure": COUNTS
    | FACTS
    | {"subject", "record", "models", "accounting", "formulas", "hardware", "timing"},
    "trainer": COUNTS
    | FACTS
    | {"subject", "record", "folding", "models", "measure", "accounting", "hardware", "timing", "report"},
    "integrations": COUNTS | FACTS | {"subject", "record", "models", "accounting", "measure", "trainer"},
    "api": COUNTS
    | {"sharing"}
    | FACTS
    | {
        "subject",
        "record",
        "folding",
        "real_steps",
        "tapes",
        "models",
        "measure",
        "accounting",
        "hardware",
        "timing",
        "plan",
        "transforms",
    },
    # Published rows judge all rooms, so they may look into each.
    "published": COUNTS
    | FACTS
    | {
        "subject",
        "record",
        "folding",
        "models",
        "transforms",
        "formulas",
        "hardware",
        "device_memory",
        "timing",
        "plan",
        "accounting",
    },
    "cli": COUNTS
    | FACTS
    | {
        "api",
        "choosing",
        "fitting",
        "subject",
        "models",
        "huggingface",
        "measure",
        "accounting",
        "hardware",
        "timing",
        "plan",
        "report",
    }
    | {"formulas", "trainer", "transforms", "record"},
    "__main__": {"cli"},
}

# Nothing imports `published`, which judges all of them; "cli" may show what it found.
MAY_IMPORT["published"] = set(MAY_IMPORT) - {"__main__", "cli", "trainer", "integrations"}

# One import that no rule allows, with its reason.
EXCEPTIONS = {
    # The room and the public function have one name; called, the room passes the call on.
    ("preflop.record", "preflop.api"),
}


@dataclass(frozen=True)
class Import:
    """One imported module, by its whole dotted name."""

    importer: str
    imported: str
    line: int
    at_top: bool
    """Runs when the importer is imported (not inside a function, not for type checkers only)."""


def room(module: str) -> str:
    """preflop.tape.events -> tape."""
    return module.split(".")[1] if module.count(".") else ""


def sources() -> dict[str, str]:
    """Dotted module name -> its text, over the whole package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("preflop", *path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text("utf-8")
    return found


def imports(module: str, text: str) -> list[Import]:
    """Everything a module imports, except what it imports for type checkers only."""
    return list(_imports(module, ast.parse(text), at_top=True))


def _imports(module: str, node: ast.AST, *, at_top: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and _is_type_checking(child.test):
            for other in child.orelse:
                yield from _imports(module, ast.Module([other], []), at_top=at_top)
        elif isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(module, alias.name, child.lineno, at_top)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{module}:{child.lineno} imports relatively"
            for alias in child.names:
                whole = f"{child.module}.{alias.name}" if child.module == "preflop" else str(child.module)
                yield Import(module, whole, child.lineno, at_top)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(module, child, at_top=at_top and not inside)


def _is_type_checking(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def all_imports(texts: dict[str, str]) -> list[Import]:
    return [found for module, text in texts.items() for found in imports(module, text)]


def wrong_rooms(texts: dict[str, str]) -> list[str]:
    """Imports from a room that the importer's room may not import."""
    complaints = []
    for found in all_imports(texts):
        if not found.imported.startswith("preflop.") or found.importer == "preflop":
            continue
        if found.imported.startswith("preflop.__") or (found.importer, found.imported) in EXCEPTIONS:
            continue
        here, there = room(found.importer), room(found.imported)
        if here not in MAY_IMPORT:
            complaints.append(f"{found.importer}: room {here!r} has no rule; give it one in MAY_IMPORT")
        elif there not in MAY_IMPORT[here] | LEAVES | {here}:
            complaints.append(f"{found.importer}:{found.line} imports {found.imported}")
    return complaints


def torch_outside(texts: dict[str, str]) -> list[str]:
    """torch imported outside of its rooms, but by the edges' functions when they are called."""
    complaints = []
    for found in all_imports(texts):
        here = room(found.importer)
        if found.imported.split(".")[0] != "torch" or here in TORCH_ROOMS or found.importer in TORCH_MODULES:
            continue
        if found.at_top or here not in TORCH_WHEN_CALLED:
            complaints.append(f"{found.importer}:{found.line} imports torch")
    return complaints


def heavy_at_top(texts: dict[str, str]) -> list[str]:
    """Slow libraries imported when a module is."""
    return [
        f"{found.importer}:{found.line} imports {found.imported} at the top"
        for found in all_imports(texts)
        if found.at_top
        and found.imported.split(".")[0] in HEAVY
        and room(found.importer) not in HEAVY_ROOMS
        and found.importer not in TORCH_MODULES
        and not (found.imported == "numpy" and found.importer in NUMPY_MODULES)
    ]


def cycles(texts: dict[str, str]) -> list[str]:
    """Modules that import each other, directly or around, when they are imported."""
    after = {
        module: {
            i.imported
            for i in imports(module, text)
            if i.at_top and i.imported in texts and i.imported != module
        }
        for module, text in texts.items()
    }
    while True:
        free = {module for module, needed in after.items() if not needed & after.keys()}
        if not free:
            return sorted(after)
        after = {module: needed for module, needed in after.items() if module not in free}


RULES = [wrong_rooms, torch_outside, heavy_at_top, cycles]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_source_keeps_the_rule(rule) -> None:
    """The package breaks no rule between rooms."""
    assert rule(sources()) == []


PLANTED = {
    wrong_rooms: ("preflop.tape.bad", "from preflop.report import terminal"),
    torch_outside: ("preflop.ledgers.bad", "def f():\n    import torch"),
    heavy_at_top: ("preflop.report.bad", "from matplotlib import pyplot"),
    cycles: ("preflop.units", "import preflop.tape.events"),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_planted_fault_is_found(rule) -> None:
    """Each rule complains of a source that breaks it: the rules can fail."""
    module, text = PLANTED[rule]
    assert any(module in complaint for complaint in rule({**sources(), module: text}))


def test_every_library_that_is_imported_is_declared() -> None:
    """What the package imports stands among its dependencies or extras in pyproject.toml."""
    text = (PACKAGE.parents[1] / "pyproject.toml").read_text("utf-8")
    declared = {name.replace("-", "_").lower() for name in re.findall(r'"([\w-]+)>=', text)}
    used = {found.imported.split(".")[0].lower() for found in all_imports(sources())}
    used -= {"pytorch_lightning"}  # the older name of what `lightning` holds
    assert used - {name.lower() for name in sys.stdlib_module_names} - {"preflop"} <= declared


def test_hardware_knows_nothing_else() -> None:
    """design.md, rule 2: hardware imports no room; ops and ledgers import no hardware."""
    assert MAY_IMPORT["hardware"] == set()
    assert "hardware" not in MAY_IMPORT["ops"] | MAY_IMPORT["ledgers"]


def test_what_is_for_type_checkers_is_no_import() -> None:
    """`if TYPE_CHECKING:` runs never; its `else` does."""
    text = "if TYPE_CHECKING:\n    import torch\nelse:\n    import tomli"
    assert [found.imported for found in imports("preflop.x", text)] == ["tomli"]


# ---- and in a real process -------------------------------------------------------------------------

MUST_NOT_LOAD = ("torch", "transformers", "matplotlib")
COMMANDS = [
    ["time", "--params", "7B", "--tokens", "1T", "--device", "h100-sxm"],
    ["time", "--params", "7B", "--tokens", "1T", "--device", "h100-sxm", "--json"],
    ["hardware"],
    ["hardware", "--json"],
    ["fit", "--device", "h100-sxm", "--gpus", "8"],
    ["dtypes", "1e-8"],
    ["precision"],
    ["einsum", "a b, b c, c d -> a d", "a=2", "b=3", "c=4", "d=5", "--device", "h100-sxm"],
    ["einsum", "b s (h d) -> b h s d", "b=2", "s=3", "h=4", "d=5", "--json"],
    ["models"],
    ["--help"],
]


def loaded_by(code: str) -> list[str]:
    """Which of MUST_NOT_LOAD a fresh Python has loaded after running the code."""
    report = f"\nimport sys\nprint('LOADED', *[m for m in {MUST_NOT_LOAD!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code + report], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()[1:]


def run_command(words: list[str]) -> str:
    return f"from preflop.cli.main import run\nassert run({words!r}) == 0"


def test_importing_preflop_loads_nothing_heavy() -> None:
    """`import preflop` loads neither torch nor numpy nor rich."""
    code = "import preflop, sys\nassert not {'numpy', 'rich', 'torch', 'jinja2'} & set(sys.modules)"
    assert loaded_by(code) == []


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_that_needs_no_torch_loads_none(words: list[str]) -> None:
    """Calculators and catalogs answer without importing torch, transformers or matplotlib."""
    assert loaded_by(run_command(words)) == []


def test_a_saved_tape_and_its_ledgers_load_no_torch(tmp_path: Path) -> None:
    """Loading a tape and reading its ledgers works where torch is not installed."""
    path = str(tmp_path / "a.tape")
    code = (
        "import preflop\n"
        f"preflop.save_tape(preflop.Tape(subject=None), {path!r})\n"
        f"tape = preflop.load_tape({path!r})\n"
        "assert preflop.flops_ledger(tape).total() == 0\n"
        "assert preflop.traffic_ledger(tape).total() == 0\n"
        "preflop.memory_ledger(tape)"
    )
    assert loaded_by(code) == []


def test_the_check_sees_torch_where_it_is() -> None:
    """The subprocess test can fail: a process that imports torch is caught."""
    assert loaded_by("import preflop, torch") == ["torch"]
