"""What a recording of the user's own tensors must put back: values, gradients, optimizer states.

`preflop.record(fn)` runs the user's code on the user's tensors. Big ones are never written (their calls
are fake); small real ones are, and gradients and optimizer states become fake. All of it is undone.
"""

from __future__ import annotations

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook


class Before:
    """How things were before the recording, remembered when they are first touched."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._versions: dict[int, tuple[torch.Tensor, int]] = {}
        self._grads: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._optimizers: dict[int, tuple[Optimizer, dict, list[dict]]] = {}
        self._handle: torch.utils.hooks.RemovableHandle | None = None

    def watch_optimizers(self) -> None:
        """Remember the state of every optimizer that is about to step."""

        def remember(optimizer: Optimizer, *_: object) -> None:
            if id(optimizer) not in self._optimizers:
                states = {parameter: dict(state) for parameter, state in optimizer.state.items()}
                groups = [dict(group) for group in optimizer.param_groups]
                self._optimizers[id(optimizer)] = (optimizer, states, groups)

        self._handle = register_optimizer_step_pre_hook(remember)

    def save_values(self, tensor: torch.Tensor) -> None:
        """Remember the values of a tensor that a real call is about to write."""
        if id(tensor) not in self._values:
            self.save_version(tensor)
            self._values[id(tensor)] = (tensor, tensor.detach().clone())

    def save_version(self, tensor: torch.Tensor) -> None:
        """Remember how often a tensor was written: autograd counts also the writes that are fake."""
        self._versions.setdefault(id(tensor), (tensor, tensor._version))

    def save_grad(self, leaf: torch.Tensor) -> None:
        """Remember the gradient of a leaf."""
        if id(leaf) not in self._grads:
            self._grads[id(leaf)] = (leaf, leaf.grad)

    def restore(self) -> None:
        """Put everything back, version counters included: a graph may have saved the tensor."""
        if self._handle is not None:
            self._handle.remove()
        for tensor, saved in reversed(self._values.values()):
            with torch.no_grad():
                tensor.copy_(saved)
        for tensor, version in self._versions.values():
            _set_version(tensor, version)
        for leaf, grad in self._grads.values():
            leaf.grad = grad
        for optimizer, states, groups in self._optimizers.values():
            optimizer.state.clear()
            optimizer.state.update(states)
            for group, saved_group in zip(optimizer.param_groups, groups):
                group.clear()
                group.update(saved_group)
        self._values.clear()
        self._versions.clear()
        self._grads.clear()
        self._optimizers.clear()


def _set_version(tensor: torch.Tensor, version: int) -> None:
    """Set a tensor's version counter; torch 2.6 takes one tensor, later ones a tuple of them."""
    set_counter = torch._C._autograd._unsafe_set_version_counter
    try:
        set_counter((tensor,), (version,))
    except TypeError:
        set_counter(tensor, version)
