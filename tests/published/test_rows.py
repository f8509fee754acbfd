"""The command over published rows: what it reads, predicts, refuses and sums up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from preflop.errors import BadFile
from preflop.published.__main__ import main
from preflop.published.conventions import recomputed_utilization
from preflop.published.predict import Prediction, Predictor
from preflop.published.rows import Row, Table, read_rows
from preflop.published.summary import errors_of, summaries, to_dict

MEMORY = (
    "id,grade,source,kind,model,layers,hidden,heads,kv_heads,ffn,mlp,vocab,seq,micro_batch,gpus,gpu,precision,ckpt,"
    "phase,mem_gib,mem_stat,notes,compile,tp\n"
)
SMALL = "X1,A,CS336 mine,train_peak_measured,cs336-tiny,2,64,2,2,128,swiglu,100,16,2,1,a100_80gb,fp32,none,train,"


def folder(tmp_path: Path, lines: str) -> Path:
    (tmp_path / "memory.csv").write_text(MEMORY + lines, "utf-8")
    return tmp_path


def test_a_row_of_any_folder_is_built_and_compared(tmp_path: Path) -> None:
    """A tiny staff model: its peak is predicted in bytes, whatever was measured."""
    rows = read_rows(folder(tmp_path, SMALL + "0.05,max_memory_allocated,,0,1\n"))
    (found,) = Predictor().predict(rows[0])
    assert found.what == "memory" and found.predicted is not None and found.predicted > 10**6
    assert found.error == pytest.approx(found.predicted / (0.05 * 2**30) - 1)


@pytest.mark.parametrize(
    ("tail", "why"),
    [
        ("0.05,max_memory_allocated,,1,1\n", "compiled"),
        ("0.05,max_memory_allocated,,0,4\n", "tensor parallelism of 4"),
        ("0.05,max_memory_allocated,own model code,0,1\n", "own model"),
    ],
)
def test_a_row_that_is_not_built_says_why(tail: str, why: str, tmp_path: Path) -> None:
    """No silent gaps: the reason stands in the row."""
    (found,) = Predictor().predict(read_rows(folder(tmp_path, SMALL + tail))[0])
    assert found.predicted is None and why in (found.why_not or "")


def test_the_command_prints_the_agreed_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """sources -> rows, built, memory, step_time, mfu_recomputed; rows -> id, what, measured, predicted, error."""
    place = folder(tmp_path, SMALL + "0.05,max_memory_allocated,,0,1\n")
    assert main(["--rows", str(place), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    source = told["sources"]["CS336 mine"]
    assert (source["rows"], source["built"], source["memory"]["n"]) == (1, 1, 1)
    assert {"n", "median_abs_error", "max_abs_error"} <= set(source["step_time"]) & set(source["mfu_recomputed"])
    assert {"id", "what", "measured", "predicted", "error", "why_not"} <= set(told["rows"][0])


def test_a_folder_without_tables_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2 and one clear message."""
    assert main(["--rows", str(tmp_path)]) == 2
    assert "no CSV file" in capsys.readouterr().err


def test_unknown_columns_are_refused(tmp_path: Path) -> None:
    """A table that measures nothing known is not guessed at."""
    (tmp_path / "odd.csv").write_text("a,b\n1,2\n", "utf-8")
    with pytest.raises(BadFile, match="none of the columns"):
        read_rows(tmp_path)


def row(table: Table, **fields: str) -> Row:
    return Row(fields.get("id", "X"), fields.pop("source"), "A", table, fields, Path())


MPT_7B = {
    "source": "llm-foundry benchmarking README", "layers": "32", "hidden": "4096", "heads": "32", "kv_heads": "32",
    "head_dim": "128", "ffn": "16384", "mlp": "gelu", "vocab": "50368", "tied_emb": "1", "seq": "2048", "gpus": "8",
    "global_batch": "48", "step_time_s": "1.15456", "mfu_pct": "46.44", "peak_tflops_used": "989.5",
}  # fmt: skip


def test_mfu_of_mpt_7b_from_its_step_time() -> None:
    """llm-foundry prints 46.44 %; 6N + 12LhS with its positions and tied head gives it to 0.1 %."""
    found = recomputed_utilization(row(Table.THROUGHPUT, **MPT_7B))
    assert found.recomputed == pytest.approx(found.printed, rel=1e-3)


def test_gpt3s_table_is_six_nd() -> None:
    """GPT-3 175B: 3.14e23 FLOPs for 300B tokens (table D.1)."""
    fields = {"train_flops": "3.14e23", "params_b": "174.6", "tokens_b": "300",
              "flops_unit_note": "6 FLOPs/param/token, attention ignored"}  # fmt: skip
    (found,) = Predictor().predict(row(Table.COMPUTE, source="GPT-3", **fields))
    assert found.error == pytest.approx(0, abs=5e-3)


def test_chinchillas_ratio() -> None:
    """73M of table A4: 1.03 times 6ND."""
    fields = {"layers": "10", "hidden": "640", "ffn": "2560", "heads": "10", "kv_size": "64", "seq": "2048",
              "vocab": "32000", "ratio_printed_ours_over_6ND": "1.03"}  # fmt: skip
    (found,) = Predictor().predict(row(Table.RATIO, source="Chinchilla", **fields))
    assert found.predicted == pytest.approx(1.0264, abs=1e-4)


def predictions(*errors: float) -> list[Prediction]:
    return [Prediction(str(n), "S", "memory", 1.0, 1 + e, e) for n, e in enumerate(errors)]


def test_errors_are_summed_up() -> None:
    """Median and worst without sign, the share that was predicted too small."""
    found = errors_of(predictions(-0.3, 0.1, -0.2))
    assert (found.median_abs_error, found.max_abs_error) == (0.2, 0.3)
    assert found.under == pytest.approx(2 / 3)


def test_a_prediction_below_its_bound_is_counted() -> None:
    """No prediction may be faster than lower_s; the summary would show it."""
    faster = Prediction("1", "S", "step_time", 1.0, 0.5, -0.5, lower_s=0.6)
    assert [s.below_lower for s in summaries([faster])] == [1]
    assert to_dict([faster])["sources"]["S"]["predictions_below_lower_s"] == 1


def test_korthikantis_activations() -> None:
    """530B with selective recomputation and sequence parallelism: 23.076171875 GiB (figure 1), exactly."""
    fields = {"kind": "activation_memory_reference", "seq": "2048", "micro_batch": "1", "hidden": "20480",
              "heads": "128", "layers": "105", "tp": "8", "pp": "35", "vpp": "m=3", "mem_gib": "23.076171875",
              "ckpt": "selective + sequence parallel"}  # fmt: skip
    (found,) = Predictor().predict(row(Table.MEMORY, source="Korthikanti", **fields))
    assert found.error == 0
