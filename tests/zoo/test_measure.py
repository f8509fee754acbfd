"""The readings themselves: the allocator's events, the real step, and what verifying does not touch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.profiler import record_function

import preflop
from preflop.cli.main import run
from preflop.errors import BadSubject
from preflop.measure.allocations import peak_bytes, spans_of
from preflop.measure.memory import check_fits, measure_steps
from preflop.subject import resolve


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))


def test_peak_is_the_largest_sum_alive() -> None:
    """Two tensors of 4000 bytes alive at once, then one of 12000: the peak is 12000."""

    def work() -> None:
        a = torch.empty(1000)
        b = torch.empty(1000)
        del a, b
        c = torch.empty(3000)
        del c

    assert peak_bytes(work) == 12_000


def test_spans_nest() -> None:
    """A span's peak counts what was alive before it; an inner span's peak is within the outer one's."""

    def work() -> None:
        with record_function("outer"):
            a = torch.empty(1000)
            with record_function("inner"):
                b = torch.empty(500)
                del b
            del a

    spans, _ = spans_of(work, lambda name: name in {"outer", "inner"})
    outer, inner = spans
    assert (outer.start_bytes, outer.peak_bytes, outer.end_bytes) == (0, 6000, 0)
    assert (inner.start_bytes, inner.peak_bytes, inner.end_bytes) == (4000, 6000, 4000)


def test_real_step_by_hand() -> None:
    """SGD on one 100 x 100 matrix: weight and input before the step; gradient and output at its peak."""
    subject = resolve(nn.Linear(100, 100, bias=False), torch.randn(10, 100), optimizer="sgd")
    found = measure_steps(subject)
    weight, x = 4 * 100 * 100, 4 * 10 * 100
    first, second = found.steps
    assert first.start_bytes == second.start_bytes == weight + x
    assert second.end_bytes == weight + x
    assert weight * 2 + x < second.peak_bytes < weight * 2 + 4 * x
    assert set(second.phases) == {"forward", "backward", "optimizer", "other"}
    assert max(second.phases.values()) == second.peak_bytes


def test_readings_repeat() -> None:
    """Two measurements of one subject are the same to the byte."""
    subject = resolve(perceptron, torch.randn(16, 64))
    assert measure_steps(subject).steps == measure_steps(subject).steps


def test_verifying_changes_nothing() -> None:
    """Parameters, gradients, mode and the random state are as they were."""
    model = perceptron().eval()
    batch = torch.randn(16, 64)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    preflop.verify(model, batch)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.training
    assert torch.equal(torch.get_rng_state(), random_state)


def test_verification_of_a_perceptron() -> None:
    """Predicted and measured peaks are the same but for wrapped numbers, FLOPs are equal."""
    found = preflop.verify(perceptron, torch.randn(16, 64))
    assert found.verifies
    assert abs(found.steady.predicted_bytes - found.steady.measured_bytes) <= 64
    assert found.flops.predicted == found.flops.counted == 2 * 16 * (64 * 128 * 2 + 128 * 32 * 3)


def test_a_step_that_is_not_the_recorded_one_does_not_verify() -> None:
    """A factory that builds a wider model every time is found out."""
    widths = iter((64, 96, 128, 160))

    def wider() -> nn.Module:
        width = next(widths)
        return nn.Sequential(nn.Linear(64, width), nn.Linear(width, 8))

    found = preflop.verify(wider, torch.randn(16, 64))
    assert not found.memory_verifies
    assert not found.verifies
    assert found.steady.error < -0.1


def test_grouped_convolution_is_not_held_against_a_wrong_counter() -> None:
    """FlopCounterMode overcounts grouped convolution's backward: said, and not called a difference."""
    found = preflop.verify(nn.Conv2d(32, 32, 3, groups=4), torch.randn(2, 32, 24, 24))
    assert found.flops.agrees is None
    assert "grouped" in found.flops.oracle_wrong[0]
    assert found.verifies


def test_device_is_refused() -> None:
    """A real step runs on this CPU; a subject for a GPU cannot be verified here."""
    with pytest.raises(BadSubject, match="runs on this machine's CPU"):
        preflop.verify(perceptron, torch.randn(16, 64), device="h100-sxm")


def test_too_large_is_refused() -> None:
    """More than this machine's memory: refused before anything is built."""
    with pytest.raises(BadSubject, match="free"):
        check_fits(2**60)


def test_a_broken_model_shows_its_own_error() -> None:
    """What the model raises reaches the user as one message."""
    with pytest.raises(BadSubject, match="mat1 and mat2"):
        measure_steps(resolve(perceptron, torch.randn(16, 63)))


FACTORY = """
import torch
from torch import nn

calls = 0

def model():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))

def growing():
    global calls
    calls += 1
    return nn.Linear(64, 64 * calls)

def batch():
    return torch.randn(16, 64)
"""


@pytest.fixture
def factory(tmp_path: Path) -> Path:
    path = tmp_path / "factory.py"
    path.write_text(FACTORY)
    return path


def test_command(factory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`preflop verify FACTORY` exits with 0 and prints its schema, or a table with the answer first."""
    words = ["verify", f"{factory}:model", "--batch-from", f"{factory}:batch"]
    assert run([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "preflop.verify/1"
    assert found["verifies"] is True
    assert found["memory"]["steady"]["predicted_bytes"] == pytest.approx(
        found["memory"]["steady"]["measured_bytes"], rel=1e-3
    )
    assert run(words) == 0
    first_words = " ".join(capsys.readouterr().out.split()[:6])  # a long path wraps the first line
    assert ": verifies Memory" in first_words


def test_command_says_no(factory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 1 where the real step is another one."""
    words = ["verify", f"{factory}:growing", "--batch-from", f"{factory}:batch"]
    assert run(words) == 1
    assert "does not verify" in capsys.readouterr().out


def test_command_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2 and one message for a model that does not exist."""
    assert run(["verify", "no-such-model", "--batch", "1"]) == 2
    assert "no model named 'no-such-model'" in capsys.readouterr().err


class Forces(nn.Module):
    """Energies and their gradient with respect to the input, as interatomic potentials train on both."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_(requires_grad=True)
        energy = self.down(torch.tanh(self.up(x))).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return (force**2).mean()


def test_a_gradient_inside_of_forward_verifies() -> None:
    """autograd.grad in forward: memory and FLOPs as measured; torch's module tracker would refuse to count."""
    found = preflop.verify(Forces(), torch.randn(64, 8))
    assert found.verifies
    assert found.flops.counted == found.flops.predicted > 0


def scripted() -> nn.Module:
    """A whole model in TorchScript."""
    return torch.jit.script(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)))


@pytest.mark.parametrize("given", ["module", "factory"])
def test_a_scripted_module_is_measured(given: str) -> None:
    """Its copy has parameters that an optimizer takes; FLOPs agree, and what its executor holds is assumed."""
    found = preflop.verify(scripted() if given == "module" else scripted, torch.randn(256, 64))
    assert found.flops.counted == found.flops.predicted > 0
    assert found.steady.measured_bytes > 0
    assert any("TorchScript" in said for said in found.assumptions)


def test_a_copy_of_a_scripted_module_trains() -> None:
    """Leaves, frozen where the original is; the original is as it was."""
    from preflop.record.prepare import copied

    mine = scripted()
    next(iter(mine.parameters())).requires_grad_(requires_grad=False)
    made = copied(mine)
    assert all(parameter.is_leaf for parameter in made.parameters())
    assert [p.requires_grad for p in made.parameters()] == [p.requires_grad for p in mine.parameters()]
    assert [p.requires_grad for p in mine.parameters()] == [False, True, True, True]


def test_a_step_that_does_not_run_under_the_counter_is_verified_by_its_memory(monkeypatch) -> None:
    """No FLOPs are compared then, the reason is shown, and memory decides."""
    from preflop.errors import BadSubject
    from preflop.measure import verify
    from preflop.report.verify_table import flops_sentence

    def refuse(subject):
        raise BadSubject("running the step raised RuntimeError: not under a mode\n  at m.py:3")

    monkeypatch.setattr(verify, "counted_flops", refuse)
    found = preflop.verify(nn.Linear(64, 64), torch.randn(64, 64))
    assert found.verifies
    assert found.flops.agrees is None
    assert found.flops.oracle_wrong[0].startswith("the step under it: running the step raised RuntimeError")
    assert "are not compared" in flops_sentence(found)
    assert found.to_dict()["flops"]["counted"] is None
