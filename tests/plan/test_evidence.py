"""Evidence beside an account: what its figures stand on, and the published rows around them."""

from __future__ import annotations

import pytest
import torch

import preflop
from preflop.plan.evidence import _rows
from preflop.report.evidence import evidence_sentences


def account(device: str, precision: str = "fp32") -> preflop.Account:  # type: ignore[name-defined]
    model, batch = torch.nn.Linear(64, 64), torch.zeros(8, 64)
    return preflop.account(model, batch, device=device, precision=precision)


def test_rows_ship_with_the_package() -> None:
    """Each has a source, a setting, both figures and the error between them."""
    assert len(_rows()) > 50
    for row in _rows():
        assert row["error"] == pytest.approx(row["predicted"] / row["measured"] - 1, abs=1e-4)
        assert row["source"] and row["model"] and row["what"] in ("memory", "step_time")


def test_the_bar_holds_what_published_errors_say() -> None:
    """Measured lies between predicted / (1 + high error) and predicted / (1 + low error)."""
    found = preflop.account("gpt2-nano", {"batch_size": 1, "sequence_length": 32}, device="v100-pcie-32gb")
    assert found.evidence is not None and found.evidence.time is not None
    bar = found.evidence.time
    assert 0 < bar.low < bar.high and bar.rows >= 4 and 0 <= bar.under <= 1
    assert len(bar.nearest) == 3 and bar.nearest[0].source


def test_evidence_stands_in_the_json_and_the_terminal() -> None:
    """`evidence` of the JSON has both bars; each is one sentence for a person."""
    found = account("a100-80gb")
    told = found.to_dict()["evidence"]
    assert {"standing", "memory", "time"} == set(told)
    assert told["memory"]["rows"]
    assert any("published rows" in sentence for sentence in evidence_sentences(found.evidence))


def test_every_figure_says_what_it_stands_on() -> None:
    """Counted, by a rule, at measured rates, or assumed: nothing else, and the context is assumed."""
    found = account("a100-80gb")
    assert found.evidence is not None
    hows = {standing.figure: standing.how for standing in found.evidence.standing}
    assert set(hows.values()) <= {"counted", "rule", "measured rates", "assumed"}
    assert hows["flops"] == "counted" and hows["memory.reserved_bytes"] == "rule"
    assert hows["memory.context_bytes"] == "assumed" and hows["time.expected_s"] == "measured rates"


def test_a_cpu_has_no_bar() -> None:
    """No published row is of this CPU."""
    found = account("cpu")
    assert found.evidence is not None
    assert (found.evidence.memory, found.evidence.time) == (None, None)


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_what_is_near_is_a_training_step_of_a_whole_model(precision: str) -> None:
    """Neither inference nor single kernels nor layers stand beside the step of a language model."""
    size = {"batch_size": 1, "sequence_length": 32}
    found = preflop.account("gpt2-nano", size, device="a100-80gb", precision=precision).evidence
    assert found is not None and found.memory is not None and found.time is not None
    for bar in (found.memory, found.time):
        assert len(bar.nearest) == 3
        for row in bar.nearest:
            assert not row.setting.endswith((", inf", "no_grad", "saved for backward", "graph kept"))
            assert "scaled_dot_product_attention" not in row.model and "layer" not in row.model


def test_nothing_is_near_a_model_without_tokens() -> None:
    """Every published row is of a language model: beside another model none is shown, and that is said."""
    found = account("a100-80gb").evidence
    assert found is not None and found.memory is not None and found.time is not None
    assert found.memory.nearest == found.time.nearest == ()
    assert "of language models" in found.memory.kind
    for sentence in evidence_sentences(found):
        assert "No published row is near" in sentence and "Nearest" not in sentence
