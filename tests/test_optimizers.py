"""Optimizer facts against torch's own optimizers: each is built, steps once, and its states are read."""

import importlib

import pytest
import torch

from preflop.errors import UnknownOptimizer
from preflop.optimizers import OPTIMIZERS, OptimizerSpec, find_optimizer

ROWS, COLUMNS = 6, 10


def trained(spec: OptimizerSpec) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    """One 6 x 10 parameter after one step of the optimizer."""
    module, _, cls = spec.torch_class.rpartition(".")
    if not hasattr(importlib.import_module(module), cls):
        pytest.skip(f"torch {torch.__version__} has no {cls}")
    parameter = torch.nn.Parameter(torch.ones(ROWS, COLUMNS))
    optimizer = getattr(importlib.import_module(module), cls)([parameter], **spec.kwargs)
    parameter.square().sum().backward()
    optimizer.step()
    return parameter, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_declared_states_are_those_torch_keeps(name: str) -> None:
    """Declared state names == the states of the parameter's shape that torch holds after a step."""
    spec = OPTIMIZERS[name]
    parameter, optimizer = trained(spec)
    kept = {
        key
        for key, value in optimizer.state[parameter].items()
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape
    }
    assert kept == set(spec.states)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_not_declared_is_small(name: str) -> None:
    """Beside its states an optimizer keeps scalars; a factored one a row and a column as well."""
    spec = OPTIMIZERS[name]
    parameter, optimizer = trained(spec)
    others = [
        value.numel()
        for value in optimizer.state[parameter].values()
        if isinstance(value, torch.Tensor) and value.shape != parameter.shape
    ]
    vectors = sorted(count for count in others if count > 1)
    assert vectors == ([ROWS, COLUMNS] if spec.factored else [])


def test_matrices_only_refuses_a_vector() -> None:
    """Muon takes two-dimensional parameters only, and its spec says so."""
    spec = OPTIMIZERS["muon"]
    assert spec.matrices_only
    if not hasattr(torch.optim, "Muon"):
        pytest.skip(f"torch {torch.__version__} has no Muon")
    with pytest.raises(ValueError, match="2D"):
        torch.optim.Muon([torch.nn.Parameter(torch.ones(3))])


@pytest.mark.parametrize("name", ["AdamW", "adamw_foreach", " sgd-momentum "])
def test_names_are_forgiving_about_case_and_dashes(name: str) -> None:
    """Case, underscores and blanks around a name do not matter."""
    assert find_optimizer(name) in OPTIMIZERS.values()


def test_unknown_names_the_nearest() -> None:
    """A misspelt optimizer is an error that names the nearest."""
    with pytest.raises(UnknownOptimizer, match=r"(?s)'adamm'.*Nearest: .*adamw"):
        find_optimizer("adamm")


def test_lion_is_unknown() -> None:
    """torch has no Lion: it is an error here, not a guess."""
    with pytest.raises(UnknownOptimizer, match="no optimizer named 'lion'"):
        find_optimizer("lion")
