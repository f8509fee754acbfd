"""Optimizer facts against torch's own optimizers: each is built, steps once, and its states are read."""

import importlib
import math
from functools import partial

import pytest
import torch

import preflop
from preflop.errors import BadSubject, PreflopError, UnknownOptimizer
from preflop.models.optimizers import AdamW8bit, Lion
from preflop.optimizers import OPTIMIZERS, OptimizerSpec, find_optimizer
from preflop.tape.events import Role
from preflop.trainer.config import make_config
from preflop.trainer.optimizer import make_optimizer

ROWS, COLUMNS = 6, 10
LARGE = (64, 65)
"""4160 elements: enough for 8-bit states, and no whole number of their blocks."""


def trained(
    spec: OptimizerSpec, shape: tuple[int, int] = (ROWS, COLUMNS), steps: int = 1
) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    """One parameter after steps of the optimizer."""
    module, _, cls = spec.torch_class.rpartition(".")
    if not hasattr(importlib.import_module(module), cls):
        pytest.skip(f"torch {torch.__version__} has no {cls}")
    parameter = torch.nn.Parameter(torch.ones(shape))
    optimizer = getattr(importlib.import_module(module), cls)([parameter], **spec.kwargs)
    for _ in range(steps):
        optimizer.zero_grad()
        parameter.square().sum().backward()
        optimizer.step()
    return parameter, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_declared_states_are_those_that_are_kept(name: str) -> None:
    """Declared state names == the states of the parameter's shape that the optimizer holds after a step."""
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


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_trains(name: str) -> None:
    """Twenty steps of a square's minimum: every element is nearer to it, and none is past it by far."""
    parameter, _ = trained(OPTIMIZERS[name], LARGE, steps=20)
    assert float(parameter.detach().abs().max()) < 1


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_declared_state_bytes_are_recorded(name: str) -> None:
    """Bytes of states by the declaration == bytes of the recorded states, beside counters and vectors."""
    spec = OPTIMIZERS[name]
    trained(spec)
    block = torch.nn.Sequential(torch.nn.Linear(*LARGE[::-1], bias=False))
    model = torch.nn.Sequential(block, torch.nn.Linear(*LARGE, bias=False))
    account = preflop.account(model, torch.randn(2, LARGE[1]), optimizer=name)
    elements = 2 * LARGE[0] * LARGE[1]
    held = account.memory.columns.optimizer_states.dtypes
    wide = held.get("float32", (0, 0))[0]
    blocks = 2 * math.ceil(LARGE[0] * LARGE[1] / 256)
    counters = 2 * 4
    if spec.quantised:
        assert held["uint8"][0] == elements * spec.states_per_parameter
        assert wide == 4 * spec.states_per_parameter * (blocks + 256)
    elif spec.matrices_only:
        # The last matrix is the head, which AdamW updates.
        assert wide == 4 * (elements // 2 + 2 * elements // 2 + 1)
    else:
        vectors = 2 * 4 * sum(LARGE) if spec.factored else 0
        assert 0 <= wide - vectors - 4 * elements * spec.states_per_parameter <= 3 * counters


def test_muon_alone_refuses_a_vector() -> None:
    """torch's Muon takes two-dimensional parameters only: the rest of a model needs another optimizer."""
    assert OPTIMIZERS["muon"].matrices_only
    if not hasattr(torch.optim, "Muon"):
        pytest.skip(f"torch {torch.__version__} has no Muon")
    with pytest.raises(ValueError, match="2D"):
        torch.optim.Muon([torch.nn.Parameter(torch.ones(3))])


def test_lion_moves_by_the_sign() -> None:
    """One step moves every element by the learning rate, against its gradient; the state is (1 - 0.99) of it."""
    parameter, optimizer = trained(OPTIMIZERS["lion"])
    assert torch.equal(parameter.detach(), torch.full((ROWS, COLUMNS), 1 - 1e-4))
    assert torch.allclose(optimizer.state[parameter]["exp_avg"], torch.full((ROWS, COLUMNS), 0.02))


def test_8bit_adamw_follows_adamw() -> None:
    """After 100 steps on one loss the 8-bit AdamW is within 5 % of AdamW's way, fused or written out."""
    torch.manual_seed(0)
    start, target = torch.randn(LARGE), torch.randn(LARGE)
    ends = []
    for make in (torch.optim.AdamW, AdamW8bit, partial(AdamW8bit, fused=True)):
        parameter = torch.nn.Parameter(start.clone())
        optimizer = make([parameter], lr=1e-2)
        for _ in range(100):
            optimizer.zero_grad()
            (parameter - target).square().sum().backward()
            optimizer.step()
        ends.append(parameter.detach())
    exact, written_out, fused = ends
    assert torch.equal(written_out, fused)
    assert float((written_out - exact).norm() / (exact - start).norm()) < 0.05


def test_8bit_states_are_blocks_of_256() -> None:
    """4160 elements: two uint8 states, 17 absmax each, two maps of 256; below 4096 elements fp32 states."""
    parameter, optimizer = trained(OPTIMIZERS["adamw-8bit"], LARGE)
    kept = {k: (v.dtype, v.numel()) for k, v in optimizer.state[parameter].items() if k != "step"}
    assert kept == {
        "state1": (torch.uint8, 4160), "state2": (torch.uint8, 4160), "qmap1": (torch.float32, 256),
        "qmap2": (torch.float32, 256), "absmax1": (torch.float32, 17), "absmax2": (torch.float32, 17),
    }  # fmt: skip
    small, optimizer = trained(OPTIMIZERS["adamw-8bit"])
    assert {k: v.dtype for k, v in optimizer.state[small].items() if k != "step"} == {
        "state1": torch.float32,
        "state2": torch.float32,
    }


def test_muon_takes_the_blocks_and_adamw_the_rest() -> None:
    """gpt2-nano: one state for the matrices of blocks, two for embeddings (and the tied head) and norms."""
    if not hasattr(torch.optim, "Muon"):
        pytest.skip(f"torch {torch.__version__} has no Muon")
    account = preflop.account("gpt2-nano", {"batch_size": 1, "sequence_length": 8}, optimizer="muon")
    tape = account.tape
    states: dict[str, set[str]] = {}
    for storage in tape.storages:
        if storage.role is Role.OPTIMIZER_STATE:
            parameter, _, state = storage.name.rpartition(".")
            states.setdefault(parameter, set()).add(state)
    hidden = {name for name, kept in states.items() if kept == {"momentum_buffer"}}
    matrices = {p.name for p in tape.parameters if len(p.shape) == 2 and p.name.startswith("blocks.")}
    assert hidden == matrices
    assert all(
        states[p.name] == {"step", "exp_avg", "exp_avg_sq"} for p in tape.parameters if p.name not in hidden
    )


def test_what_is_assumed_is_said() -> None:
    """On a GPU 8-bit AdamW is one kernel that holds nothing; on the CPU it is written out, and nothing is assumed."""
    batch = torch.randn(2, 64)
    layer = torch.nn.Linear(64, 64)
    on_gpu = preflop.account(layer, batch, optimizer="adamw-8bit", device="h100-sxm")
    assert any("one kernel per parameter" in text for text in on_gpu.assumptions)
    assert any(row.op == "preflop.adamw_8bit_" and row.flops == 39 * 64 * 64 for row in on_gpu.operators)
    assert on_gpu.flops.unknown == {}
    on_cpu = preflop.account(layer, batch, optimizer="adamw-8bit")
    assert not any("adamw-8bit" in text for text in on_cpu.assumptions)


@pytest.mark.parametrize("name", ["lion", "adamw-8bit", "muon", "adamw-in-backward", "lion-in-backward"])
def test_a_real_step_verifies(name: str) -> None:
    """The recorded step of gpt2-nano is the measured one, within the bytes that any of its steps is off."""
    if name == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip(f"torch {torch.__version__} has no Muon")
    found = preflop.verify("gpt2-nano", {"batch_size": 2, "sequence_length": 32}, optimizer=name)
    assert found.verifies
    assert abs(found.steady.predicted_bytes - found.steady.measured_bytes) <= 128


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optimizer": "adamw-in-backward", "microbatches": 2}, "Take microbatches=1, or adamw"),
        ({"optimizer": "sgd-in-backward", "precision": "fp16-mixed"}, "Take bf16-mixed, or sgd"),
        ({"optimizer": "adamw-8bit", "precision": "bf16-fp32-states"}, "Take bf16"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict, said: str) -> None:
    """An update in backward with microbatches or a loss scale, 8-bit states that are to be fp32: say so."""
    with pytest.raises(BadSubject, match=said):
        preflop.account(torch.nn.Linear(4, 4), torch.randn(2, 4), **options)


def test_the_trainer_runs_lion_and_names_what_it_does_not_run() -> None:
    """`preflop train` steps Lion over its two groups; Muon, 8-bit states and updates in backward are refused."""
    settings = {"data": "d", "out": "r", "steps": 1}
    layer = torch.nn.Linear(8, 4)
    optimizer = make_optimizer(layer.parameters(), make_config({**settings, "optimizer": "lion"}))
    layer(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    assert isinstance(optimizer, Lion)
    assert [set(optimizer.state[p]) for p in layer.parameters()] == [{"exp_avg"}, {"exp_avg"}]
    for name in ("muon", "adamw-8bit", "sgd-in-backward"):
        with pytest.raises(PreflopError, match=f"does not run {name}"):
            make_config({**settings, "optimizer": name})


def test_any_name_goes_in_backward() -> None:
    """The suffix makes the same optimizer, updated in backward; a misspelt name is still an error."""
    spec = find_optimizer("AdamW_fused-in-backward")
    assert (spec.name, spec.in_backward) == ("adamw-fused-in-backward", True)
    assert spec.kwargs == OPTIMIZERS["adamw-fused"].kwargs
    with pytest.raises(UnknownOptimizer, match="'adamm'"):
        find_optimizer("adamm-in-backward")


@pytest.mark.parametrize("name", ["AdamW", "adamw_foreach", " sgd-momentum "])
def test_names_are_forgiving_about_case_and_dashes(name: str) -> None:
    """Case, underscores and blanks around a name do not matter."""
    assert find_optimizer(name) in OPTIMIZERS.values()


def test_unknown_names_the_nearest() -> None:
    """A misspelt optimizer is an error that names the nearest."""
    with pytest.raises(UnknownOptimizer, match=r"(?s)'adamm'.*Nearest: .*adamw"):
        find_optimizer("adamm")
