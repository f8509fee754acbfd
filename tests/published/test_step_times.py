"""Published step times by the rules for collectives, tensor-parallel layers and fp8 linears."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest

from preflop.published.plans import plan_of
from preflop.published.predict import Predictor
from preflop.published.rows import CannotBuild, Row, Table
from preflop.published.seconds import step_seconds

LAYER = {
    "kind": "layer_time_measured", "hidden": "6144", "heads": "64", "ffn": "24576", "seq": "2048", "micro_batch": "4",
    "gpus": "8", "gpu": "a100_80gb", "tp": "8", "precision": "fp16",
}  # fmt: skip
MPT_13B = {
    "layers": "40", "hidden": "5120", "heads": "40", "kv_heads": "40", "ffn": "20480", "mlp": "gelu",
    "vocab": "50368", "tied_emb": "1", "seq": "2048", "micro_batch": "2", "gpus": "8", "gpu": "a100_80gb", "dp": "8",
    "sharding": "FSDP FULL_SHARD", "precision": "amp_bf16", "ckpt": "none", "attn_impl": "flash/triton",
    "extra": "mp_mode=DEFAULT;offload=False", "grad_accum": "3", "step_time_s": "5.43206",
}  # fmt: skip


def row(source: str, fields: dict[str, str], **changed: str) -> Row:
    """A row of a table of step times."""
    return Row("X", source, "A", Table.THROUGHPUT, {**fields, **changed}, Path())


@pytest.mark.parametrize(
    ("step_s", "parallel", "recompute"),
    [
        (0.0196, "0", "baseline (TP8, no recompute)"),
        (0.0190, "1", "sequence parallel"),
        (0.0203, "1", "selective + sequence parallel"),
    ],
)
def test_korthikantis_layers_within_ten_percent(step_s: float, parallel: str, recompute: str) -> None:
    """Table 4: 19.6, 19.0 and 20.3 ms of one layer of the 22B model on eight A100s."""
    published = row(
        "Korthikanti et al. 2022", LAYER, seq_parallel=parallel, ckpt=recompute, step_time_s=str(step_s)
    )
    found = Predictor().predict(published)[0]
    assert found.error is not None and abs(found.error) < 0.10
    assert found.lower_s is not None and found.predicted is not None and found.predicted > found.lower_s


def test_whole_pipelines_are_refused_by_name() -> None:
    """The paper's other rows have several stages."""
    with pytest.raises(CannotBuild, match="pipelines"):
        plan_of(row("Korthikanti et al. 2022", LAYER, kind="train_step_time_measured"))


def test_collectives_explain_most_of_a_sharded_step_that_was_too_fast() -> None:
    """MPT-13B, microbatches of 2 x 2048: 5.43 s published. Without collectives and copies 4.5 s."""
    published = row("llm-foundry benchmarking README", MPT_13B)
    predictor = Predictor()
    found = next(p for p in predictor.predict(published) if p.what == "step_time")
    assert found.error is not None and abs(found.error) < 0.10
    import dataclasses

    plan = plan_of(published)
    _, alone = step_seconds(
        dataclasses.replace(plan, sharding=None, copied_bytes=0), predictor.tapes[plan.key]
    )
    assert alone is not None and alone / 5.43206 - 1 < -0.15


def test_fp8_linears_are_faster_by_less_than_two() -> None:
    """The casts and everything that is no linear stay: MPT-13B in fp8 on H100s."""

    def seconds(precision: str) -> float:
        found = Predictor().predict(
            row("llm-foundry benchmarking README", MPT_13B, gpu="h100_80gb", precision=precision)
        )
        step = next(p for p in found if p.what == "step_time")
        assert step.predicted is not None and step.lower_s is not None and step.predicted >= step.lower_s
        assert any("fp8" in words for words in step.assumed) is (precision == "amp_fp8")
        return step.predicted

    assert 1.1 < seconds("amp_bf16") / seconds("amp_fp8") < 2.0


def test_no_shipped_prediction_is_faster_than_its_lower_bound() -> None:
    """Every step time that ships as evidence: predicted >= lower_s > 0, and so was what was measured."""
    text = (resources.files("preflop.plan") / "evidence.json").read_text("utf-8")
    timed = [found for found in json.loads(text)["rows"] if found["what"] == "step_time"]
    assert len(timed) > 100
    assert all(found["predicted"] >= found["lower_s"] > 0 for found in timed)
    assert all(found["measured"] > found["lower_s"] for found in timed)


def test_an_update_by_lists_moves_what_its_operators_do() -> None:
    """torchtitan's: of every fp32 parameter the bytes that a recorded update by lists moves, and 12 of clipping."""
    import torch

    import preflop
    from preflop.published.plans import _CLIPPED_FOREACH_ADAMW_BYTES

    model = torch.nn.Linear(1024, 1024, bias=False)
    step = preflop.account(model, torch.zeros(8, 1024), optimizer="adamw-foreach", device="a100-80gb")
    rows = [row for row in step.operators if row.phase == "optimizer" and row.op.startswith("aten._foreach")]
    moved = sum(row.read_bytes + row.write_bytes for row in rows)
    assert round(moved / 1024**2) == _CLIPPED_FOREACH_ADAMW_BYTES - 12
