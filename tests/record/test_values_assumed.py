"""What is assumed where a step asks for values that a recording does not have, and that it is said."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import preflop
from preflop.measure.memory import measure_steps
from preflop.subject import resolve
from preflop.tape.replay import story


class Base(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)


class Matched(Base):
    """Pairs rows by a solver outside of torch, as detection losses do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        rows = torch.as_tensor(y.detach().cpu().numpy()[:, :8].argsort(axis=0)[:4, 0].copy())
        return y[rows].sum()


class Checked(Base):
    """Refuses NaN and infinity, in three ways."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        assert y.isnan().sum() == 0
        assert torch.isfinite(y).all()
        assert not torch.isinf(y).any()
        return y.sum()


class Padded(Base):
    """Leaves out rows of padding, and masks their columns only where there are any."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        real = (x == 0.0).sum(dim=1) != x.shape[1]
        columns = torch.ones_like(x, dtype=torch.bool)[real]
        y = self.layer(x[real])
        if not columns.all():
            y = y.masked_fill(~columns, 0.0) * y
        assert (y.detach() == x).all(), "a check, which passes"
        assert not (y.detach() != x).any(), "a check, which passes"
        return y.sum()


@pytest.mark.parametrize(
    ("kind", "words"), [(Matched, "read by numpy"), (Checked, "taken as finite where a step asks")]
)
def test_measures_as_assumed(kind: type[nn.Module], words: str) -> None:
    """The recording goes on as real values would have it go on, with the real step's peak, and says so."""
    batch = torch.rand(256, 64)
    step = preflop.account(kind(), batch)
    assert any(words in text for text in step.tape.assumptions)
    measured = measure_steps(resolve(kind(), batch)).steady_peak_bytes
    assert abs(step.memory.peak_bytes - measured) <= 1e-3 * measured


def test_what_is_different_is_followed() -> None:
    """The answer of a comparison is known to what follows it, but for a check that all are alike."""
    batch = torch.rand(256, 64)
    step = preflop.account(Padded(), batch)
    assert any("different from what they are compared to" in text for text in step.tape.assumptions)
    assert not any(signature.op == "aten.masked_fill" for signature in step.tape.signatures)


class LongMask(Base):
    """A floating mask over pairs, larger than the floats that a recording keeps, read for its values."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        pairs = torch.where(mask[:, None, :] & mask[:, :, None], torch.tensor(0.0), -1e9)
        rows = pairs[:, 0].clone()
        rows[:, 0] = 1.0
        y = self.layer(x)
        if (rows > 0).any().item():
            y = y + y[(rows > 0).nonzero(as_tuple=True)][:, None].mul(y)
        return (y.sum(-1) + rows).sum()


def test_a_floating_mask_is_known_as_the_boolean_that_it_is_made_from() -> None:
    """Nothing is assumed, and the real step peaks where it is said to."""
    batch = (torch.rand(2, 512, 64), torch.ones(2, 512, dtype=torch.bool))
    step = preflop.account(LongMask(), batch)
    assert not step.tape.assumptions
    measured = measure_steps(resolve(LongMask(), batch)).steady_peak_bytes
    assert abs(step.memory.peak_bytes - measured) <= 1e-3 * measured


def test_numpy_keeps_refusing_what_wants_a_gradient() -> None:
    """`.numpy()` of a result that needs a gradient is the user's error, recorded or not."""

    class Wrong(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.layer(x).numpy()).sum()

    with pytest.raises(preflop.PreflopError, match="requires grad"):
        preflop.account(Wrong(), torch.rand(4, 64))


def test_compiled_and_scripted_parts_are_stated() -> None:
    """What does not run as its Python is named in the assumptions."""
    plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    for part, words in ((torch.compile(plain), "compiled parts"), (torch.jit.script(plain), "TorchScript")):
        step = preflop.account(nn.Sequential(part, nn.Linear(8, 2)), torch.rand(4, 8))
        assert any(words in text for text in step.tape.assumptions)
    said = preflop.account(plain, torch.rand(4, 8)).tape.assumptions
    assert not any("compiled parts" in text or "TorchScript" in text for text in said)


def test_modules_may_hold_operators() -> None:
    """An operator as an attribute cannot be copied, and need not be."""

    class Holds(Base):
        def __init__(self) -> None:
            super().__init__()
            self.operator = torch.ops.aten.relu.default

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.operator(self.layer(x)).sum()

    assert preflop.account(Holds(), torch.rand(4, 64)).flops.model == 2 * 2 * 4 * 64 * 64


def test_each_layers_own_mask_does_not_fill_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Floating masks of known booleans are real while there is room; beyond it the recording is the same, event by
    event, and what is attended is still known (Mistral in fp32 at 11,520 positions took 17 GB of masks)."""
    length, layers = 32, 5

    class Masked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            allowed = torch.ones(length, length, dtype=torch.bool).tril()
            for _ in range(layers):
                x = nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=allowed)
            return x

    def recorded() -> Any:
        batch = torch.zeros(2, 1, length, 16, requires_grad=True)
        return preflop.account(Masked(), batch, optimizer=None).tape

    roomy = recorded()
    monkeypatch.setattr("preflop.record.recorder.MASKS_LIMIT_BYTES", 2 * length * length * 4)
    narrow = recorded()
    assert story(narrow) == story(roomy)
    pairs = {s.attended_pairs for s in narrow.signatures if "attention" in s.op}
    assert pairs == {2 * length * (length + 1) // 2}


def test_a_branch_that_was_not_taken_is_told_with_its_line() -> None:
    """`if h.sum() > 0`: the line, the answer, and that the other one is not priced."""

    class Branches(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            if y.sum() > 0:
                y = self.layer(y)
            return y

    said = preflop.account(Branches(), torch.zeros(2, 64)).assumptions
    (branch,) = [text for text in said if "read back by .item()" in text]
    assert re.fullmatch(
        r"a bool read back by \.item\(\) at .*test_values_assumed\.py:\d+: taken as False; what another answer would "
        r"run is not priced\.", branch,
    )  # fmt: skip
