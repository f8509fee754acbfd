"""The settings of a run from the command line's words, a TOML file, and the run that is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

from preflop.errors import BadFile
from preflop.quantity import read_count, read_number
from preflop.trainer.config import FILE, TrainConfig, make_config, read_toml


def settings(flags: Mapping[str, Any], *, config: str | None, resume: bool) -> TrainConfig:
    """Flags before the TOML file, and both before what the run that is resumed was made with.

    Args:
        flags: what was typed, as typed; None where it was not.

    Raises:
        PreflopError: a setting that is not known, missing, or cannot be.
    """
    values: dict[str, Any] = {} if config is None else read_toml(config)
    for name, typed in flags.items():
        if typed is not None:
            values[name] = _read(name, typed)
    out = values.get("out")
    saved = Path(str(out)) / FILE
    if resume and out and saved.is_file():
        before = read_toml(saved)
        for one, other in (("steps", "epochs"), ("epochs", "steps")):
            if one in values:
                before.pop(other, None)
        values = {**before, **values}
    if resume and out and not saved.is_file() and "data" not in values:
        raise BadFile(
            f"there is no run in {out} to go on with: no {saved}.\n"
            "  Name the folder of a run (--out), or begin one: --data DIR --steps N."
        )
    return make_config(values)


def _read(name: str, typed: Any) -> Any:
    """A flag's text as the setting's kind of value."""
    kind = get_type_hints(TrainConfig)[name]
    kinds = getattr(kind, "__args__", (kind,))
    if bool in kinds or str in kinds:
        return typed
    flag = f"--{name.replace('_', '-')}"
    if int in kinds:
        return 0 if typed.strip() == "0" else read_count(typed, flag)
    return float(read_number(typed, flag))
