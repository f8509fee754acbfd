"""Builds the optimizer of a subject, with the state precision that it asks for.

`StatesInFloat32` and `MasterCopy` are what "bf16-fp32-states" and "bf16-master" mean, as small real
optimizers around torch's own: they train, and are recorded like any other.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from preflop.errors import BadSubject
from preflop.models.optimizers import MuonWithAdamW, is_hidden_matrix
from preflop.optimizers import OptimizerSpec
from preflop.subject import FAILURES, Subject, users_error

Make = Callable[[Any], torch.optim.Optimizer]
"""From parameters to the optimizer over them."""


@dataclass(frozen=True, slots=True)
class Named:
    """A parameter, its dotted name, and the class of the module that holds it."""

    name: str
    holder: str
    parameter: nn.Parameter


def named_parameters(model: nn.Module) -> list[Named]:
    """The model's distinct parameters in its order."""
    holders = {
        id(parameter): type(module).__name__
        for module in model.modules()
        for parameter in module._parameters.values()
        if parameter is not None
    }
    return [
        Named(name, holders.get(id(parameter), ""), parameter) for name, parameter in model.named_parameters()
    ]


def build_optimizer(subject: Subject, named: Sequence[Named]) -> torch.optim.Optimizer | None:
    """The optimizer over the trainable parameters, or None where the subject has none."""
    if subject.optimizer is None:
        return None
    trainable = [one for one in named if one.parameter.requires_grad]
    if not trainable:
        return None
    parameters = [one.parameter for one in trainable]
    spec = subject.optimizer
    if not isinstance(spec, OptimizerSpec):
        make = partial(_users_optimizer, spec)
        return _in_precision(subject, parameters, make, lambda parameter: make)
    maker = _Maker(spec, subject.device, trainable)
    if spec.in_backward:
        return InBackward(
            parameters, lambda parameter: _in_precision(subject, [parameter], maker.all, maker.alone)
        )
    return _in_precision(subject, parameters, maker.all, maker.alone)


def assumptions_of(subject: Subject) -> list[str]:
    """What is assumed of a known optimizer, in words."""
    spec = subject.optimizer
    if not isinstance(spec, OptimizerSpec):
        return []
    said = []
    if spec.quantised and subject.device != "cpu":
        said.append(
            f"{spec.name}: one kernel per parameter, as bitsandbytes has on CUDA, which allocates nothing; "
            "written out, the update would hold several fp32 tensors of its size"
        )
    if spec.matrices_only:
        said.append(
            f"{spec.name}: matrices of the repeated blocks by torch.optim.Muon (without blocks all but the last); "
            "embeddings, the head, norms, biases and what is no matrix by AdamW"
        )
    return said


def _in_precision(
    subject: Subject,
    parameters: list[nn.Parameter],
    make: Make,
    make_alone: Callable[[nn.Parameter], Make],
) -> torch.optim.Optimizer:
    """The optimizer with states in the precision that the subject asks for."""
    precision = subject.precision
    if precision.master_copy:
        return MasterCopy(parameters, make_alone)
    if precision.state_dtype != precision.parameter_dtype:
        return StatesInFloat32(parameters, make_alone)
    return make(parameters)


class _Maker:
    """Makes a known optimizer in the form that runs on the device.

    torch updates by lists (foreach) on CUDA and one by one on the CPU where neither is asked for
    (torch/optim/optimizer.py, `_default_to_fused_or_foreach`). Fake parameters hide the device from
    it, so the choice is made here.
    """

    def __init__(self, spec: OptimizerSpec, device: str, trainable: Iterable[Named]) -> None:
        self._on_gpu = device != "cpu"
        self._class = _class_of(spec)
        self._options = dict(spec.kwargs)
        self._hidden: set[int] | None = None
        if spec.matrices_only:
            self._hidden = _hidden(trainable)
        elif spec.quantised:
            self._options["fused"] = self._on_gpu
        elif "foreach" in self._class.__init__.__code__.co_varnames and not {"foreach", "fused"} & set(
            spec.kwargs
        ):
            # Adafactor's own default is the loop everywhere.
            self._options["foreach"] = self._on_gpu and not spec.torch_class.endswith("Adafactor")

    def all(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Over all of the given parameters."""
        if self._hidden is None:
            return self._class(parameters, **self._options)
        hidden = [parameter for parameter in parameters if id(parameter) in self._hidden]
        others = [parameter for parameter in parameters if id(parameter) not in self._hidden]
        return MuonWithAdamW(hidden, others, foreach=self._on_gpu)

    def alone(self, parameter: nn.Parameter) -> Make:
        """What makes the optimizer over stand-ins of one parameter."""
        if self._hidden is None:
            return self.all
        if id(parameter) in self._hidden:
            return lambda parameters: MuonWithAdamW(parameters, ())
        return lambda parameters: MuonWithAdamW((), parameters, foreach=self._on_gpu)


def _class_of(spec: OptimizerSpec) -> Any:
    module, _, name = spec.torch_class.rpartition(".")
    cls = getattr(importlib.import_module(module), name, None)
    if cls is None:
        raise BadSubject(f"torch {torch.__version__} has no {spec.torch_class}.")
    return cls


def _hidden(trainable: Iterable[Named]) -> set[int]:
    """Ids of the parameters that Muon updates."""
    matrices = [
        one.name for one in trainable if one.parameter.ndim == 2 and "embedding" not in one.holder.lower()
    ]
    return {
        id(one.parameter)
        for one in trainable
        if is_hidden_matrix(one.name, tuple(one.parameter.shape), one.holder, matrices)
    }


def _users_optimizer(make: Callable[[Any], Any], parameters: list[Any]) -> torch.optim.Optimizer:
    try:
        optimizer = make(parameters)
    except FAILURES as error:
        raise users_error("making the optimizer", error) from error
    if not hasattr(optimizer, "step") or not hasattr(optimizer, "zero_grad"):
        raise BadSubject(
            f"optimizer= made {type(optimizer).__name__}, which is no torch Optimizer.\n"
            "  It must return an object with step() and zero_grad()."
        )
    return optimizer  # type: ignore[no-any-return]


class _Wrapped(torch.optim.Optimizer):
    """An optimizer that steps torch's own on fp32 stand-ins, one parameter at a time."""

    def __init__(self, parameters: list[torch.nn.Parameter], make: Callable[[nn.Parameter], Make]) -> None:
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
        inner = self._make(parameter)([wide])
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
        inner = self._make(parameter)([master])
        if state["inner"]:
            inner.state[master] = state["inner"]
        inner.step()
        state["inner"] = inner.state[master]
        parameter.copy_(master)
        master.grad = None


class InBackward(torch.optim.Optimizer):
    """Updates each parameter in backward, when its gradient is complete, and lets the gradient go.

    Source: https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html:
    one optimizer per parameter, stepped by a hook that `register_post_accumulate_grad_hook` sets.
    """

    def __init__(
        self, parameters: list[nn.Parameter], make: Callable[[nn.Parameter], torch.optim.Optimizer]
    ) -> None:
        super().__init__(parameters, {})
        self.gradient_is_there: Callable[[nn.Parameter], None] = lambda parameter: None
        """Called before each update."""
        self._each: dict[nn.Parameter, torch.optim.Optimizer] = {}
        for parameter in parameters:
            self._each[parameter] = make(parameter)
            self._each[parameter].state = self.state
            parameter.register_post_accumulate_grad_hook(self.update)

    def update(self, parameter: nn.Parameter) -> None:
        """One update of one parameter."""
        self.gradient_is_there(parameter)
        self._each[parameter].step()
        self._each[parameter].zero_grad()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing: backward has done it."""
