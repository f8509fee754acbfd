"""Preflop prices a PyTorch training run before it happens.

    import preflop
    preflop.account(model, batch, device="h100-sxm").show()

`account` records one training step on fake tensors (no memory, no arithmetic) and tells its memory,
FLOPs, bytes moved and time. `record` records any call; the ledgers read its tape; `verify` runs the
step for real and holds the prediction against it.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from preflop.account import Account as Account
    from preflop.api import account as account
    from preflop.api import account_real as account_real
    from preflop.api import record as record
    from preflop.api import verify as verify
    from preflop.axes import sized_batch as sized_batch
    from preflop.choosing import choices as choices
    from preflop.choosing import what_if as what_if
    from preflop.errors import PreflopError as PreflopError
    from preflop.ledgers.copies import copies_ledger as copies_ledger
    from preflop.ledgers.flops import flops_ledger as flops_ledger
    from preflop.ledgers.ledger import Ledger as Ledger
    from preflop.ledgers.memory import memory_ledger as memory_ledger
    from preflop.ledgers.traffic import traffic_ledger as traffic_ledger
    from preflop.measure.no_copies import no_copies as no_copies
    from preflop.measure.no_copies import same_storage as same_storage
    from preflop.measure.utilization import Meter as Meter
    from preflop.tape.events import Tape as Tape
    from preflop.tape.file import load as load_tape
    from preflop.tape.file import save as save_tape
    from preflop.timing.einsum import einsum_cost as einsum_cost

__version__ = "0.1.0"

# Public name -> where it lives. Loaded when first asked for, so that `import preflop` imports no torch.
_HOMES = {
    "Account": "account.Account",
    "account": "api.account",
    "account_real": "api.account_real",
    "record": "api.record",
    "verify": "api.verify",
    "sized_batch": "axes.sized_batch",
    "choices": "choosing.choices",
    "what_if": "choosing.what_if",
    "PreflopError": "errors.PreflopError",
    "Ledger": "ledgers.ledger.Ledger",
    "flops_ledger": "ledgers.flops.flops_ledger",
    "memory_ledger": "ledgers.memory.memory_ledger",
    "traffic_ledger": "ledgers.traffic.traffic_ledger",
    "copies_ledger": "ledgers.copies.copies_ledger",
    "no_copies": "measure.no_copies.no_copies",
    "same_storage": "measure.no_copies.same_storage",
    "einsum_cost": "timing.einsum.einsum_cost",
    "Meter": "measure.utilization.Meter",
    "Tape": "tape.events.Tape",
    "load_tape": "tape.file.load",
    "save_tape": "tape.file.save",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'preflop' has no attribute {name!r}")
    place, _, attribute = home.rpartition(".")
    value = getattr(importlib.import_module(f"preflop.{place}"), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


class _Package(ModuleType):
    """`preflop.account` stays the function when the file of that name is imported, which binds a
    submodule to its package otherwise. (The room `record` can be called like its function.)"""

    def __setattr__(self, name: str, value: Any) -> None:
        if callable(value) or not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
