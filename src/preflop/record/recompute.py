"""Activation recomputation, set on a copy of the model: which modules, and what they keep.

Modules are wrapped with torch.utils.checkpoint (non-reentrant), as training code does.
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

aten = torch.ops.aten
# Selective recomputation keeps what is dear to compute: matmuls, convolutions and attention.
_KEPT = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_cudnn_attention.default,
}


def apply_recompute(model: nn.Module, recompute: str | Callable[[str], bool]) -> None:
    """Wrap the chosen modules' forward. `model` must be a copy that nobody else holds.

    Raises:
        BadSubject: nothing matches, or the model has no repeated blocks.
    """
    if recompute == "none":
        return
    if callable(recompute):
        chosen = [module for name, module in model.named_modules() if name and recompute(name)]
        if not chosen:
            names = [name for name, _ in model.named_modules() if name]
            raise BadSubject(
                "recompute= chose no module.\n"
                f"  It is called with each module's name: {', '.join(names[:5])}, ..."
            )
    else:
        chosen = blocks_of(model)
    _without_cache(model)
    for module in chosen:
        _wrap(module, selective=recompute == "selective")


def _without_cache(model: nn.Module) -> None:
    """A cache of keys and values grows when a block is run again, so models that keep one switch it off
    under checkpointing (transformers does, with a warning)."""
    if "use_cache" in inspect.signature(model.forward).parameters:
        model.forward = partial(model.forward, use_cache=False)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks: members of ModuleLists or Sequentials of one class that have children.

    Raises:
        BadSubject: there are none.
    """
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
    if not found:
        raise BadSubject(
            "this model has no repeated blocks (members of one nn.ModuleList or nn.Sequential).\n"
            "  Give recompute= a callable from module name to bool (in Python), or 'none'."
        )
    return found


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    del context, args, kwargs
    policies = torch_checkpoint.CheckpointPolicy
    return policies.MUST_SAVE if op in _KEPT else policies.PREFER_RECOMPUTE


def _contexts() -> Any:
    return torch_checkpoint.create_selective_checkpoint_contexts(_policy)


def _wrap(module: nn.Module, *, selective: bool) -> None:
    forward = module.forward
    options: dict[str, Any] = {"use_reentrant": False}
    if selective:
        options["context_fn"] = _contexts
    module.forward = partial(torch_checkpoint.checkpoint, forward, **options)
