"""Builds the optimizer of a subject, with the state precision that it asks for.

`StatesInFloat32` and `MasterCopy` are what "bf16-fp32-states" and "bf16-master" mean, as small real
optimizers around torch's own: they train, and are recorded like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from preflop.errors import BadSubject
from preflop.optimizers import OptimizerSpec
from preflop.subject import Subject, users_error


def build_optimizer(
    subject: Subject, parameters: Iterable[torch.nn.Parameter]
) -> torch.optim.Optimizer | None:
    """The optimizer over the trainable parameters, or None where the subject has none."""
    if subject.optimizer is None:
        return None
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if not trainable:
        return None
    spec = subject.optimizer
    if isinstance(spec, OptimizerSpec):
        make = maker(spec, subject.device)
    else:
        make = partial(_users_optimizer, spec)
    if (
        isinstance(spec, OptimizerSpec)
        and spec.matrices_only
        and any(parameter.ndim != 2 for parameter in trainable)
    ):
        raise BadSubject(
            f"{spec.name} takes matrices only, and this model has other parameters (biases, norms).\n"
            "  Give optimizer= a callable that gives the matrices to it and the rest to AdamW."
        )
    precision = subject.precision
    if precision.master_copy:
        return MasterCopy(trainable, make)
    if precision.state_dtype != precision.parameter_dtype:
        return StatesInFloat32(trainable, make)
    return make(trainable)


def maker(spec: OptimizerSpec, device: str) -> Callable[[Any], torch.optim.Optimizer]:
    """From parameters to torch's optimizer, in the form torch would choose on the device.

    torch updates by lists (foreach) on CUDA and one by one on the CPU where neither is asked for
    (torch/optim/optimizer.py, `_default_to_fused_or_foreach`). Fake parameters hide the device from
    it, so the choice is made here.
    """
    cls = getattr(torch.optim, spec.torch_class.rpartition(".")[2], None)
    if cls is None:
        raise BadSubject(f"torch {torch.__version__} has no {spec.torch_class}.")
    kwargs = dict(spec.kwargs)
    takes_foreach = "foreach" in cls.__init__.__code__.co_varnames
    if takes_foreach and "foreach" not in kwargs and "fused" not in kwargs:
        kwargs["foreach"] = device != "cpu"
        if spec.torch_class.endswith("Adafactor"):
            kwargs["foreach"] = False  # Adafactor's own default everywhere
    return lambda parameters: cls(parameters, **kwargs)


def _users_optimizer(make: Callable[[Any], Any], parameters: list[Any]) -> torch.optim.Optimizer:
    try:
        optimizer = make(parameters)
    except Exception as error:
        raise users_error("making the optimizer", error) from error
    if not hasattr(optimizer, "step") or not hasattr(optimizer, "zero_grad"):
        raise BadSubject(
            f"optimizer= made {type(optimizer).__name__}, which is no torch Optimizer.\n"
            "  It must return an object with step() and zero_grad()."
        )
    return optimizer  # type: ignore[no-any-return]


class _Wrapped(torch.optim.Optimizer):
    """An optimizer that steps torch's own on fp32 stand-ins, one parameter at a time."""

    def __init__(
        self, parameters: list[torch.nn.Parameter], make: Callable[[Any], torch.optim.Optimizer]
    ) -> None:
        super().__init__(parameters, {})
        self._make = make

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter)

    def _update(self, parameter: torch.nn.Parameter) -> None:
        raise NotImplementedError


class StatesInFloat32(_Wrapped):
    """16-bit weights and gradients, fp32 states: each update runs in fp32 and is rounded back."""

    def _update(self, parameter: torch.nn.Parameter) -> None:
        wide = torch.nn.Parameter(parameter.detach().float())
        wide.grad = parameter.grad.float()  # type: ignore[union-attr]
        inner = self._make([wide])
        if self.state[parameter]:
            inner.state[wide] = self.state[parameter]
        inner.step()
        self.state[parameter] = inner.state[wide]
        parameter.copy_(wide)


class MasterCopy(_Wrapped):
    """16-bit weights and gradients with an fp32 copy of each weight, which is what is updated."""

    def _update(self, parameter: torch.nn.Parameter) -> None:
        state = self.state[parameter]
        if "master" not in state:
            state["master"] = torch.nn.Parameter(parameter.detach().float())
            state["inner"] = {}
        master = state["master"]
        master.grad = parameter.grad.float()  # type: ignore[union-attr]
        inner = self._make([master])
        if state["inner"]:
            inner.state[master] = state["inner"]
        inner.step()
        state["inner"] = inner.state[master]
        parameter.copy_(master)
        master.grad = None
