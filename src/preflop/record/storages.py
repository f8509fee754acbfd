"""Births and deaths of memory: a table of storages held weakly, on one counter of ticks.

A storage is watched through a weak reference to torch's own storage object, which lives exactly as
long as the memory does (torch keeps one Python object per storage while it is watched). Views share
their storage, so memory is counted once; nothing here keeps anything alive.
"""

from __future__ import annotations

import weakref
from functools import partial

import torch

from preflop.tape.events import Role, Storage


class StorageTable:
    """Every storage seen while recording, by the order in which it was first seen."""

    def __init__(self) -> None:
        self.tick = 0
        self.storages: list[Storage] = []
        self.alive: dict[int, int] = {}
        """id of torch's storage object -> our storage id."""
        self._watches: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def next_tick(self) -> int:
        """Advance the counter."""
        self.tick += 1
        return self.tick

    def living(self) -> set[int]:
        """The storages that are alive."""
        return set(self.alive.values())

    def known(self, tensor: torch.Tensor) -> int | None:
        """Our id of the tensor's storage, or None where it was never seen."""
        return self.alive.get(id(tensor.untyped_storage()))

    def was_there(self, tensor: torch.Tensor, role: Role, name: str = "") -> int:
        """Enter memory that existed before the recording (tick 0), or give its id."""
        return self._enter(tensor, born=0, role=role, name=name, call=-1)

    def born(self, tensor: torch.Tensor, call: int, role: Role = Role.TEMPORARY) -> int:
        """Enter memory that the call just made, or give its id."""
        storage = tensor.untyped_storage()
        known = self.alive.get(id(storage))
        if known is not None:
            return known
        return self._enter(tensor, born=self.next_tick(), role=role, name="", call=call)

    def set_role(self, tensor: torch.Tensor, role: Role, name: str = "") -> None:
        """Say what a storage is for, once that is known. Memory never seen before is entered."""
        number = self.known(tensor)
        if number is None:
            number = self.born(tensor, -1)
        entry = self.storages[number]
        entry.role = role
        entry.name = name or entry.name

    def order_deaths(self) -> None:
        """Deaths with nothing between them get the order in which the storages were made.

        Where torch frees a table at once (autocast's cache of casts), the order is that of addresses:
        it says nothing, and would make two recordings of one step differ.
        """
        died = sorted(
            (storage.died, number)
            for number, storage in enumerate(self.storages)
            if storage.died is not None
        )
        start = 0
        for position in range(1, len(died) + 1):
            if position < len(died) and died[position][0] == died[position - 1][0] + 1:
                continue
            run = died[start:position]
            for tick, number in zip((tick for tick, _ in run), sorted(n for _, n in run)):
                self.storages[number].died = tick
            start = position

    def close(self) -> None:
        """Stop watching."""
        self._watches.clear()
        self.alive.clear()

    def _enter(self, tensor: torch.Tensor, *, born: int, role: Role, name: str, call: int) -> int:
        storage = tensor.untyped_storage()
        key = id(storage)
        known = self.alive.get(key)
        if known is not None:
            return known
        number = len(self.storages)
        self.storages.append(
            Storage(
                bytes=storage.nbytes(),
                dtype=dtype_name(tensor.dtype),
                shape=tuple(tensor.shape),
                born=born,
                died=None,
                role=role,
                name=name,
                call=call,
            )
        )
        self.alive[key] = number
        self._watches[number] = weakref.ref(storage, partial(self._died, number, key))
        return number

    def _died(self, number: int, key: int, _: object) -> None:
        self.tick += 1
        self.storages[number].died = self.tick
        self._watches.pop(number, None)
        if self.alive.get(key) == number:
            del self.alive[key]


_NAMES: dict[torch.dtype, str] = {}


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name without the module.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    name = _NAMES.get(dtype)
    if name is None:
        name = _NAMES[dtype] = str(dtype).removeprefix("torch.")
    return name
