"""Formulas against what their papers, and the projects that use them, printed.

The two tables in tests/data are rows that others published, with their sources.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from preflop.formulas.training_time import narayanan_training_days, training_days
from preflop.formulas.utilization import hardware_flops_utilization, model_flops_utilization
from preflop.formulas.work import (
    causal_flops_per_token,
    chinchilla_core_flops_per_token,
    chinchilla_flops_per_token,
    chinchilla_parameters,
    korthikanti_model_flops,
    korthikanti_selective_hardware_flops,
    narayanan_iteration_flops,
    palm_flops_per_token,
    six_nd,
)

DATA = Path(__file__).parents[1] / "data"
pytestmark = pytest.mark.published

Row = dict[str, str]


def rows(name: str, **where: str) -> list[Row]:
    """Rows of a table in tests/data whose columns have these values."""
    with (DATA / name).open(newline="") as file:
        return [row for row in csv.DictReader(file) if all(row[key] == value for key, value in where.items())]


def whole(row: Row, *names: str) -> tuple[int, ...]:
    """Integer columns of a row."""
    return tuple(int(row[name]) for name in names)


def label(row: Row) -> str:
    return f"{row['id']}-{row['model']}" if "id" in row else f"{row['section']}-{row['model']}"


def of_convention(convention: str) -> list[Row]:
    return rows("published_utilization.csv", convention=convention)


def copies(row: Row) -> int:
    """nanotron's parameters: a tied head is a second copy once the pipeline has two stages."""
    tied_and_split = row["tied_emb"] == "1" and int(row["pp"]) > 1
    extra = int(row["vocab"]) * int(row["hidden"]) if tied_and_split else 0
    return round(float(row["params_b"]) * 1e9) + extra


def multiplied(row: Row) -> int:
    """Parameters without the embedding that is looked up; a tied one stays, as the head."""
    looked_up = 0 if row["tied_emb"] == "1" else int(row["vocab"]) * int(row["hidden"])
    return round(float(row["params_b"]) * 1e9) - looked_up


def full(row: Row, parameters: int) -> float:
    return palm_flops_per_token(parameters, *whole(row, "layers", "heads", "head_dim", "seq"))


def mfu_percent(row: Row, flops_per_token: float) -> float:
    peak_flops_per_s = float(row["peak_tflops_used"]) * 1e12
    return 100 * model_flops_utilization(flops_per_token, float(row["tokens_per_s_gpu"]), peak_flops_per_s)


@pytest.mark.parametrize("row", of_convention("full"), ids=label)
def test_mfu_within_a_fifth_of_a_point(row: Row) -> None:
    """llm-foundry, torchtitan (April 2024), PaLM: (6N + 12LHQT) x tokens/s / peak is the printed MFU."""
    expected = mfu_percent(row, full(row, round(float(row["params_b"]) * 1e9)))
    assert expected == pytest.approx(float(row["mfu_pct"]), abs=0.2)


@pytest.mark.parametrize("row", of_convention("full, head copied by pipeline"), ids=label)
def test_nanotron_mfu_within_2_percent(row: Row) -> None:
    """nanotron counts embedding and head, twice where a pipeline splits tied ones."""
    assert mfu_percent(row, full(row, copies(row))) == pytest.approx(float(row["mfu_pct"]), rel=0.02)


@pytest.mark.parametrize("row", of_convention("full without embedding"), ids=label)
def test_full_attention_without_embedding_within_1_percent(row: Row) -> None:
    """NeMo (2024) TFLOP/s and torchtitan (from August 2024) MFU leave the looked-up embedding out."""
    flops_per_token = full(row, multiplied(row))
    if row["mfu_pct"]:
        assert mfu_percent(row, flops_per_token) == pytest.approx(float(row["mfu_pct"]), rel=0.01)
    else:
        tflops = flops_per_token * float(row["tokens_per_s_gpu"]) / 1e12
        assert tflops == pytest.approx(float(row["tflops_gpu"]), rel=0.01)


@pytest.mark.parametrize("row", of_convention("causal without embedding"), ids=label)
def test_causal_attention_without_embedding_within_1_percent(row: Row) -> None:
    """Megatron-Bridge's TFLOP/s halve attention for causality and leave the embedding out."""
    per_token = causal_flops_per_token(multiplied(row), *whole(row, "layers", "heads", "head_dim", "seq"))
    tflops = per_token * float(row["tokens_per_s_gpu"]) / 1e12
    assert tflops == pytest.approx(float(row["tflops_gpu"]), rel=0.01)


@pytest.mark.parametrize("row", of_convention("narayanan"), ids=label)
def test_bigscience_tflops_within_2_percent(row: Row) -> None:
    """BigScience's TFLOP/s are the SC21 formula's: recomputation counted."""
    batch, seq, layers, hidden, vocab, gpus = whole(
        row, "global_batch", "seq", "layers", "hidden", "vocab", "gpus"
    )
    flops = narayanan_iteration_flops(batch, seq, layers, hidden, vocab)
    tflops = flops / (gpus * float(row["step_time_s"])) / 1e12
    assert tflops == pytest.approx(float(row["tflops_gpu"]), rel=0.02)


@pytest.mark.parametrize("row", of_convention("korthikanti"), ids=label)
def test_korthikanti_table_5_within_a_tenth_of_a_point(row: Row) -> None:
    """530B with selective recomputation: equation 7 gives its 56.0 % MFU, equation 8 its 57.0 % HFU."""
    sizes = whole(row, "global_batch", "seq", "layers", "hidden", "vocab")
    device_s = int(row["gpus"]) * float(row["step_time_s"]) * float(row["peak_tflops_used"]) * 1e12
    assert 100 * korthikanti_model_flops(*sizes) / device_s == pytest.approx(float(row["mfu_pct"]), abs=0.1)
    hardware = korthikanti_selective_hardware_flops(*sizes)
    assert 100 * hardware / device_s == pytest.approx(float(row["hfu_pct"]), abs=0.1)


def test_mt_nlg_step_within_1_percent() -> None:
    """MT-NLG 530B, 2240 A100, 1920 x 2048 tokens in 60.1 s: 126 TFLOP/s a GPU by the SC21 formula."""
    flops = narayanan_iteration_flops(1920, 2048, 105, 20_480, 51_200)
    assert flops / (2240 * 60.1) / 1e12 == pytest.approx(126, rel=0.01)


def test_full_recompute_is_four_thirds_of_model_flops_but_for_the_head() -> None:
    """96 / 72: the SC21 formula is 4/3 of Korthikanti's equation 7 where there is no vocabulary."""
    assert 3 * narayanan_iteration_flops(2, 64, 3, 32, 0) == 4 * korthikanti_model_flops(2, 64, 3, 32, 0)


@pytest.mark.parametrize("row", rows("chinchilla_tables.csv", section="Table A4"), ids=label)
def test_chinchilla_table_a4_to_two_decimals(row: Row) -> None:
    """Layers' FLOPs over 6 x parameters give the printed ratio; the formula as printed does not."""
    layers, seq, d, heads, kv, f, vocab = whole(
        row, "layers", "seq", "hidden", "heads", "kv_size", "ffn", "vocab"
    )
    core = chinchilla_core_flops_per_token(layers, seq, d, heads, kv, f)
    six_t = six_nd(chinchilla_parameters(layers, d, heads, kv, f, vocab), 1)
    assert round(core / six_t, 2) == float(row["ratio_printed_ours_over_6ND"])
    printed = chinchilla_flops_per_token(layers, seq, d, heads, kv, f, vocab)
    assert printed == float(row["flops_asprinted_per_token"])


@pytest.mark.parametrize("row", rows("chinchilla_tables.csv", section="Table A9"), ids=label)
def test_chinchilla_table_a9_parameters_within_1_percent(row: Row) -> None:
    """L(5dkh + 2df) + Vd is the printed parameter count."""
    sizes = whole(row, "layers", "hidden", "heads", "kv_size", "ffn", "vocab")
    assert chinchilla_parameters(*sizes) == pytest.approx(float(row["params_printed"]), rel=0.01)


@pytest.mark.parametrize(
    ("model", "parameters", "tokens", "petaflop_days"),
    [
        ("BERT-Base", 109e6, 250e9, 1.89),
        ("RoBERTa-Base", 125e6, 2000e9, 17.4),
        ("GPT-3 Medium", 356e6, 300e9, 7.42),
    ],
)
def test_gpt3_table_d1_within_1_percent(
    model: str, parameters: float, tokens: float, petaflop_days: float
) -> None:
    """GPT-3's table D.1 is 6ND in PF-days of 1e15 x 86400 FLOPs."""
    assert six_nd(round(parameters), round(tokens)) / (1e15 * 86_400) == pytest.approx(
        petaflop_days, rel=0.01
    )


def test_llama3_405b_training_flops_within_1_percent() -> None:
    """Llama 3.1 405B on 15.6T tokens: the paper says 3.8e25 FLOPs."""
    assert six_nd(405_850_000_000, 15_600_000_000_000) == pytest.approx(3.8e25, rel=0.01)


def test_70b_on_15t_tokens_takes_143_9_days() -> None:
    """1024 H100 at a dense 989.5e12 and MFU 0.5: 143.9 days."""
    assert round(training_days(70 * 10**9, 15 * 10**12, 1024, 989.5e12, 0.5), 1) == 143.9


@pytest.mark.parametrize(
    ("parameters", "tokens", "gpus", "achieved", "days"),
    [(175e9, 300e9, 1024, 140e12, 34), (1008e9, 450e9, 3072, 163e12, 84)],
)
def test_narayanan_days_as_printed(
    parameters: float, tokens: float, gpus: int, achieved: float, days: int
) -> None:
    """SC21 section 5.1: GPT-3 in 34 days on 1024 A100, a trillion parameters in 84 on 3072."""
    assert round(narayanan_training_days(round(parameters), round(tokens), gpus, achieved)) == days


def test_llm_foundry_hfu_is_four_thirds_of_mfu_when_checkpointing() -> None:
    """mpt-13b, 512 H100: MFU 41.12 % and, one more forward, HFU 54.83 %."""
    row = rows("published_utilization.csv", id="T00007")[0]
    per_token = full(row, round(float(row["params_b"]) * 1e9))
    peak_flops_per_s = float(row["peak_tflops_used"]) * 1e12
    hfu = hardware_flops_utilization(
        per_token, per_token / 3, float(row["tokens_per_s_gpu"]), peak_flops_per_s
    )
    assert 100 * hfu == pytest.approx(float(row["hfu_pct"]), abs=0.05)
