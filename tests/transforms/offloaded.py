"""Blocks whose saved tensors wait in the host's memory, by torch's own hooks: what the transform is held to."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from preflop.record.recompute import blocks_of, without_cache

for _name in ("to_host", "to_device"):
    torch.library.define(f"preflop::{_name}", "(Tensor x) -> Tensor")
    torch.library.impl(f"preflop::{_name}", "default", torch.clone)
    torch.library.register_fake(f"preflop::{_name}", torch.empty_like)


@dataclass(eq=False)
class Moved:
    """One storage, and where it is."""

    device: Tensor | None
    """All of it, as one vector."""
    host: Tensor | None = None
    left: int = 0


@dataclass(eq=False)
class Block:
    """One call of a block."""

    moved: list[Moved] = field(default_factory=list)
    back: bool = False

    def leave(self) -> None:
        """What the block kept goes to the host."""
        for moved in self.moved:
            if moved.device is not None and moved.left:
                moved.host = torch.ops.preflop.to_host(moved.device)
                moved.device = None

    def fetch(self) -> None:
        """And comes back."""
        if self.back:
            return
        self.back = True
        for moved in self.moved:
            if moved.device is None and moved.host is not None:
                moved.device = torch.ops.preflop.to_device(moved.host)
                moved.host = None


class Offloading:
    """Wraps a model's blocks."""

    def __init__(self, model: nn.Module, least_bytes: int) -> None:
        self.least_bytes = least_bytes
        self.known: dict[int, tuple[Any, Moved]] = {}
        self.stays: list[Any] = []
        without_cache(model)
        for block in blocks_of(model):
            block.forward = partial(self.run, block.forward)
        model.forward = partial(self.outer, model, model.forward)

    def outer(self, model: nn.Module, forward: Callable[..., Any], *args: Any, **inputs: Any) -> Any:
        """Forward of the whole: parameters, buffers and inputs are not moved."""
        given = [x for x in (*args, *inputs.values()) if isinstance(x, Tensor)]
        self.stays = [x.untyped_storage() for x in (*model.parameters(), *model.buffers(), *given)]
        return forward(*args, **inputs)

    def run(self, forward: Callable[..., Any], /, *args: Any, **inputs: Any) -> Any:
        """Forward of one block."""
        block = Block()
        with torch.autograd.graph.saved_tensors_hooks(partial(self.pack, block), self.unpack):
            output = forward(*args, **inputs)
        block.leave()
        return output

    def pack(self, block: Block, tensor: Tensor) -> Any:
        """A tensor that autograd keeps: itself, or where to find it."""
        storage = tensor.untyped_storage()
        small = storage.nbytes() < self.least_bytes
        if small or not tensor.dtype.is_floating_point or any(storage is one for one in self.stays):
            return block, None, tensor
        reference, moved = self.known.get(id(storage), (lambda: None, None))
        if reference() is not storage:
            with torch.no_grad():
                vector = torch.as_strided(tensor, (storage.nbytes() // tensor.itemsize,), (1,), 0)
            moved = Moved(vector)
            self.known[id(storage)] = weakref.ref(storage), moved
        moved.left += 1
        if moved not in block.moved:
            block.moved.append(moved)
        return block, moved, (tensor.shape, tensor.stride(), tensor.storage_offset())

    def unpack(self, packed: Any) -> Tensor:
        """What backward asks for."""
        block, moved, what = packed
        block.fetch()
        if moved is None:
            return what
        tensor = torch.as_strided(moved.device, *what)
        moved.left -= 1
        if not moved.left:
            moved.device = None
        return tensor
