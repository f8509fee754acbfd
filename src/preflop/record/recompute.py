"""Activation recomputation, set on a copy of the model: which modules, and what they keep.

Modules are wrapped with torch.utils.checkpoint, as training code does.
Source: https://docs.pytorch.org/docs/stable/checkpoint.html
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from preflop.errors import BadSubject
from preflop.recomputation import KEPT_OPERATORS, NO_BLOCKS, Manner, parse

_KEPT = {
    getattr(torch.ops.aten, name.removeprefix("aten.")).default
    for name in KEPT_OPERATORS
    if hasattr(torch.ops.aten, name.removeprefix("aten."))
}


def apply_recompute(model: nn.Module, recompute: str | Callable[[str], bool]) -> None:
    """Wrap the chosen modules' forward. `model` must be a copy that nobody else holds.

    Raises:
        BadSubject: nothing matches, or the model has no repeated blocks.
    """
    wanted = parse(recompute)
    if wanted is None:
        return
    if wanted.chosen is not None:
        named = dict(model.named_modules())
        chosen = [named[name] for name in wanted.of_modules(list(named))]
    else:
        chosen = wanted.of_blocks(blocks_of(model))
    without_cache(model)
    for module in chosen:
        _wrap(module, wanted.manner)


def without_cache(model: nn.Module) -> None:
    """A cache of keys and values grows when a block is run again, so models that keep one switch it off
    under checkpointing (transformers does, with a warning)."""
    if "use_cache" in inspect.signature(model.forward).parameters:
        model.forward = partial(model.forward, use_cache=False)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks: members of ModuleLists or Sequentials of one class that have children.

    Raises:
        BadSubject: there are none.
    """
    found = repeated_blocks(model)
    if not found:
        raise BadSubject(NO_BLOCKS)
    return found


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """As `blocks_of`; none where there are none."""
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if id(module) in inside or not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        kinds = Counter(type(child) for child in module if any(True for _ in child.children()))
        kinds.pop(nn.Sequential, None)
        repeated = {kind for kind, count in kinds.items() if count > 1}
        for child in module:
            if type(child) in repeated:
                found.append(child)
                inside.update(id(inner) for inner in child.modules())
    return found


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    del context, args, kwargs
    policies = torch_checkpoint.CheckpointPolicy
    return policies.MUST_SAVE if op in _KEPT else policies.PREFER_RECOMPUTE


def _contexts() -> Any:
    return torch_checkpoint.create_selective_checkpoint_contexts(_policy)


def _wrap(module: nn.Module, manner: Manner) -> None:
    forward = module.forward
    if manner is Manner.REENTRANT:
        module.forward = partial(_reentrant, forward)
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if manner is Manner.SELECTIVE:
        options["context_fn"] = _contexts
    module.forward = partial(torch_checkpoint.checkpoint, forward, **options)


def _reentrant(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """The reentrant kind takes no keywords; they are bound, as transformers' GradientCheckpointingLayer does
    (transformers/modeling_layers.py)."""
    return torch_checkpoint.checkpoint(partial(forward, **kwargs), *args, use_reentrant=True)
