"""Folding: record a stack of equal blocks once and replay it.

The model's copy is cut down to a few blocks before it is recorded; `transforms.depth.deepen` then
writes the tape of the whole stack, after proving on the recorded events that the inner blocks repeat.
What is checked here, before recording, is the structure: the blocks' classes, parameters, flags and
attributes other than an index are equal, and they carry no hooks and share no parameters.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from preflop.tape.stack import RECORDED, Refused, Stack

LEAST_SAVED = 2
"""A stack is folded only where that leaves out at least so many instances."""


@dataclass(frozen=True, slots=True)
class Fold:
    """One stack that was cut down, and where it stands."""

    stack: Stack
    container: nn.Module
    left_out: tuple[tuple[str, nn.Module], ...]


def find_stacks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Outermost ModuleLists and Sequentials long enough to be worth folding, with their paths."""
    found: list[tuple[str, nn.Module]] = []
    inside: set[int] = set()
    for path, module in model.named_modules():
        if id(module) in inside or not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        if len(module) >= RECORDED + LEAST_SAVED and any(any(True for _ in c.children()) for c in module):
            found.append((path, module))
            inside.update(id(inner) for inner in module.modules())
    return found


def cut(model: nn.Module, least_period: int = 1) -> tuple[list[Fold], list[str]]:
    """Cut every foldable stack of the model down to what is recorded.

    Args:
        least_period: blocks per repetition at least. Blocks that look alike may still be given different
            things by the model (every other one a window): what repeats then is a pair.

    Returns:
        The folds, and for each stack that is left whole the reason.
    """
    folds: list[Fold] = []
    reasons: list[str] = []
    shared = _shared_parameters(model)
    for path, container in find_stacks(model):
        try:
            folds.append(_cut_one(path, container, shared, least_period))
        except Refused as refused:
            reasons.append(f"{path or 'the model'}: {refused}")
    return folds, reasons


def restore(folds: list[Fold]) -> None:
    """Put the left-out blocks back."""
    for fold in folds:
        table = fold.container._modules
        kept = dict(table)
        table.clear()
        merged = {**kept, **dict(fold.left_out)}
        table.update(sorted(merged.items(), key=lambda item: int(item[0])))


def _cut_one(path: str, container: nn.Module, shared: set[int], least_period: int) -> Fold:
    blocks = list(container.named_children())
    if [name for name, _ in blocks] != [str(number) for number in range(len(blocks))]:
        raise Refused("its members have names of their own")
    kinds = [_structure(block, shared) for _, block in blocks]
    first, count, period = _repetition(kinds, least_period)
    instances = count // period
    if instances < RECORDED + LEAST_SAVED:
        raise Refused("its blocks differ in class, parameters or attributes")
    begin = first + RECORDED * period
    end = first + instances * period
    left_out = tuple(blocks[begin:end])
    if end < len(blocks):
        raise Refused("the last blocks differ from the others")
    for name, _ in left_out:
        del container._modules[name]
    return Fold(Stack(path, first, period, instances), container, left_out)


def _repetition(kinds: list[Any], least_period: int = 1) -> tuple[int, int, int]:
    """(first, count, period) of the longest periodic end of the list, shortest period first.

    >>> _repetition(list("x" + 6 * "ab"))
    (1, 12, 2)
    >>> _repetition(list("xababab"))        # too few to save anything
    (0, 0, 1)
    """
    best = (0, 0, 1)
    for period in range(least_period, 9):
        start = len(kinds)
        while start > 0 and (
            len(kinds) - start < period or kinds[start - 1] == kinds[start - 1 + period]
        ):
            start -= 1
        count = (len(kinds) - start) // period * period
        start = len(kinds) - count
        if count // period >= RECORDED + LEAST_SAVED and count > best[1]:
            best = (start, count, period)
            if start == 0:
                break
    return best


def _shared_parameters(model: nn.Module) -> set[int]:
    """Parameters that more than one module holds."""
    seen: set[int] = set()
    shared: set[int] = set()
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                (shared if id(parameter) in seen else seen).add(id(parameter))
    return shared


def _structure(block: nn.Module, shared: set[int]) -> Any:
    """What makes two blocks equal, as a comparable value."""
    return tuple(
        (path, type(module), module.training, tuple(_tensors(module, shared)), tuple(_attributes(module)))
        for path, module in block.named_modules()
    )


def _tensors(module: nn.Module, shared: set[int]) -> Iterator[Any]:
    for kind, table in (("parameter", module._parameters), ("buffer", module._buffers)):
        for name, tensor in table.items():
            if tensor is None:
                yield kind, name
                continue
            if id(tensor) in shared:
                raise Refused("blocks share parameters with other modules")
            yield kind, name, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad


_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
)
_NOT_COMPARED = frozenset({"_parameters", "_buffers", "_modules", "training", *_HOOKS})
# Attributes that only say which block it is.
_INDEX_NAMES = {"layer_idx", "layer_id", "layer_index", "idx", "index", "block_idx", "layer_number",
                "layer_num", "block_id", "depth_index", "i"}


def _attributes(module: nn.Module) -> Iterator[Any]:
    own = vars(module)
    if any(own.get(table) for table in _HOOKS):
        raise Refused("blocks carry hooks")
    for name, value in own.items():
        if name in _NOT_COMPARED:
            continue
        if name in _INDEX_NAMES and isinstance(value, int):
            continue
        yield name, value if type(value) in _PLAIN else _comparable(value)


_CONTAINERS = frozenset({dict, OrderedDict, set, list, tuple})
"""Most attributes of a module are empty ones of these: torch's tables of hooks."""
_PLAIN = frozenset({type(None), bool, int, float, str, complex, torch.dtype})


def _comparable(value: Any) -> Any:
    if type(value) in _CONTAINERS and not value:
        return type(value)
    if isinstance(value, (bool, int, float, str, complex, enum.Enum, torch.dtype)):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(_comparable(item) for item in value)
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, dict):
        return tuple((str(key), _comparable(item)) for key, item in value.items())
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return type(value)
