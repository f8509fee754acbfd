"""The optimizer over a model's parameters, in the states' precision that the run asks for."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from preflop.optimizers import find_optimizer
from preflop.precision import Precision, find_precision
from preflop.trainer.config import TrainConfig


def make_optimizer(parameters: Iterable[nn.Parameter], config: TrainConfig) -> torch.optim.Optimizer:
    """The run's optimizer: one group that decays (matrices), one that does not (biases, norms).

    A tied weight comes once in `Module.parameters()`, so it is in one group. Groups are filled in the
    order of the parameters, which is that of the module and the same in every process.
    """
    precision = find_precision(config.precision)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    cls, options = _torch_class(config)
    if precision.state_dtype != precision.parameter_dtype:
        return Float32Update(_groups(trained, options), cls, options, precision)
    return cls(_groups(trained, options), **options)


def _groups(parameters: list[nn.Parameter], options: dict[str, Any]) -> list[dict[str, Any]]:
    decayed = [parameter for parameter in parameters if parameter.ndim >= 2]
    others = [parameter for parameter in parameters if parameter.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others}]
    if "weight_decay" in options:
        groups[1]["weight_decay"] = 0.0
    return [group for group in groups if group["params"]]


def _torch_class(config: TrainConfig) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """torch's class and its arguments: the optimizer's own, and those of the run that it takes."""
    spec = find_optimizer(config.optimizer)
    module, _, name = spec.torch_class.rpartition(".")
    cls: type[torch.optim.Optimizer] = getattr(importlib.import_module(module), name)
    takes = inspect.signature(cls).parameters
    wanted = {
        "lr": config.learning_rate,
        "weight_decay": config.weight_decay,
        "betas": (config.beta1, config.beta2),
    }
    return cls, {**{name: value for name, value in wanted.items() if name in takes}, **spec.kwargs}


class Float32Update(torch.optim.Optimizer):
    """16-bit parameters updated in fp32: each update runs on an fp32 stand-in and is rounded back.

    With a master copy the stand-in is kept as the state "master", else it is made anew each time.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        cls: type[torch.optim.Optimizer],
        options: dict[str, Any],
        precision: Precision,
    ) -> None:
        super().__init__(groups, options)
        self._class, self._keeps_copy = cls, precision.master_copy

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        del closure
        for group in self.param_groups:
            options = {name: value for name, value in group.items() if name in self.defaults}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, options)

    def _update(self, parameter: nn.Parameter, options: dict[str, Any]) -> None:
        state = self.state[parameter]
        wide = nn.Parameter(state.pop("master") if "master" in state else parameter.detach().float())
        wide.grad = parameter.grad.float()  # type: ignore[union-attr]
        inner = self._class([wide], **options)
        inner.state[wide] = dict(state)
        inner.step()
        self.state[parameter] = inner.state[wide]
        parameter.copy_(wide)
        if self._keeps_copy:
            self.state[parameter]["master"] = wide.detach()
