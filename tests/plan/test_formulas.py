"""Operator rows as formulas in B and S: their value is the row's figure."""

from __future__ import annotations

import json
import re

import pytest

import preflop
from preflop.choosing import Formulas, formulas
from preflop.cli.main import run
from preflop.errors import BadSubject
from preflop.plan.evaluate import PolynomialRow
from preflop.plan.formulas import formula_rows, product_formula
from preflop.plan.prices import OVER

SIZE = {"batch_size": 6, "sequence_length": 96}
OPTIONS = {"precision": "bf16-mixed", "device": "h100-sxm"}
RANK = {"B": 6, "S": 96}


@pytest.fixture(scope="module")
def found() -> Formulas:
    return formulas("gpt2-nano", SIZE, **OPTIONS)


@pytest.fixture(scope="module")
def gpt2() -> Formulas:
    return formulas("gpt2", {"batch_size": 2, "sequence_length": 128}, device="h100-sxm")


def value(text: str, names: dict[str, int] | None = None) -> int:
    """A formula's value at the size."""
    assert re.fullmatch(r"[\w*+^ -]+", text), text
    return int(eval(text.replace("^", "**"), {"__builtins__": {}}, {**RANK, **(names or {})}))


def test_values_are_the_accounts_rows(found: Formulas) -> None:
    """Every formula x calls, at the size == the account's row: FLOPs, read, written; no row is missing."""
    account = preflop.account("gpt2-nano", SIZE, **OPTIONS)
    made = sorted(
        (r.op, r.phase, r.module, r.calls, value(r.flops) * r.calls, value(r.read_bytes) * r.calls,
         value(r.write_bytes) * r.calls)
        for r in found.rows
        if r.flops is not None and r.read_bytes is not None and r.write_bytes is not None
    )  # fmt: skip
    assert len(made) == len(found.rows)
    assert made == sorted(
        (r.op, r.phase, r.module, r.calls, r.flops, r.read_bytes, r.write_bytes) for r in account.operators
    )


def test_named_formulas_have_the_same_value(found: Formulas) -> None:
    """With the model's names in place of numbers the value stays."""
    for row in found.rows:
        assert row.flops is not None
        assert row.named["flops"] is not None
        assert value(row.named["flops"], found.names) == value(row.flops)


def test_a_matmul_reads_as_people_write_it(found: Formulas) -> None:
    """The first feed-forward product: 2*B*S*128*512, named 2*B*S*hidden*ffn."""
    place = "blocks.*.feed_forward.up", "forward"
    row = next(r for r in found.rows if (r.module, r.phase) == place and r.flops_at)
    assert set((row.flops or "").split("*")) == {"2", "B", "S", "128", "512"}
    assert set((row.named["flops"] or "").split("*")) == {"2", "B", "S", "hidden", "ffn"}


def test_shapes_are_formulas_too(found: Formulas) -> None:
    """Shapes at the size == the account's shapes."""
    account = preflop.account("gpt2-nano", SIZE, **OPTIONS)
    wanted = {row.shapes for row in account.operators}

    def at_size(formula: re.Match[str]) -> str:
        return str(value(formula[0]))

    for row in found.rows:
        assert re.sub(r"[\dBS^*+ ]*[BS][\dBS^*+ ]*(?=[,)])", lambda f: f" {at_size(f)}", row.shapes).replace(
            "( ", "("
        ) in wanted


def test_microbatches_multiply_the_calls() -> None:
    """Three microbatches: forward calls x 3, the optimizer's as they were."""
    one, three = (formulas("gpt2-nano", SIZE, microbatches=n, **OPTIONS) for n in (1, 3))
    for phase, times in (("forward", 3), ("optimizer", 1)):
        count = [sum(r.calls for r in f.rows if r.phase == phase) for f in (one, three)]
        assert count[1] == times * count[0]


@pytest.mark.parametrize(
    ("number", "factors", "text"),
    [
        (2 * 4096 * 14336, [4096, 14336], "2*B*S*4096*14336"),
        (12 * 64 * 8, [12, 64], "8*B*S*12*64"),
        (32 * 128 * 8, [32, 128, 8], "8*B*S*32*128"),
        (2 * (50257 + 768), [50257, 768], "2*B*S*50257 + 2*B*S*768"),
        (768, [768], "B*S*768"),
        (10007, [768], "10007*B*S"),
    ],
)
def test_coefficients_are_products_of_the_rows_sizes(number: int, factors: list[int], text: str) -> None:
    """Where it is such a product (or a sum of two) it is written so, else as the number it is."""
    from fractions import Fraction

    assert product_formula([Fraction(n) for n in (0, 0, 0, number, 0, 0)], factors) == text


@pytest.mark.parametrize(
    ("op", "shapes", "flops", "read", "written"),
    [
        ("addmm", "(768,) x (B*S, 3072) x (3072, 768) -> (B*S, 768)", "2*B*S*3072*768",
         "4*768 + 4*3072*768 + 4*B*S*3072", "4*B*S*768"),
        ("mm", "(768, B*S) x (B*S, 3072) -> (768, 3072)", "2*B*S*768*3072", "4*B*S*768 + 4*B*S*3072",
         "4*768*3072"),
        ("add", "(B, S, 768) x (B, S, 768) -> (B, S, 768)", "B*S*768", "8*B*S*768", "4*B*S*768"),
        ("embedding", "(50257, 768) x (B, S) -> (B, S, 768)", "0", "8*B*S + 4*B*S*768", "4*B*S*768"),
    ],
)  # fmt: skip
def test_bytes_are_those_of_the_tensors(
    gpt2: Formulas, op: str, shapes: str, flops: str, read: str, written: str
) -> None:
    """GPT-2 in fp32: four bytes of each element of each tensor, and no other product that happens to be equal
    (4 x 768 is 3072)."""
    row = next(r for r in gpt2.rows if (r.op, r.shapes) == (f"aten.{op}", shapes))
    assert (row.flops, row.read_bytes, row.write_bytes) == (flops, read, written)


def test_a_small_layer_is_written_by_its_own_sizes() -> None:
    """8 x 16: 2*B*S*8*16, not 16*B*S*16."""
    rows = [
        PolynomialRow(
            "aten.mm", "forward", "", None, "float32", 1, "(#0, #1) x (#1, #2) -> (#0, #2)",
            {0: (0, 0, 0, 1, 0, 0), 1: (8, 0, 0, 0, 0, 0), 2: (16, 0, 0, 0, 0, 0)},
            (0, 0, 0, 2 * 8 * 16 * OVER, 0, 0), (4 * 8 * 16 * OVER, 0, 0, 4 * 8 * OVER, 0, 0),
            (0, 0, 0, 4 * 16 * OVER, 0, 0),
        )
    ]  # fmt: skip
    (row,) = formula_rows(rows, (2, 3), {"hidden": 8, "ffn": 16})
    assert (row.flops, row.named["flops"]) == ("2*B*S*8*16", "2*B*S*hidden*ffn")
    assert (row.read_bytes, row.write_bytes) == ("4*8*16 + 4*B*S*8", "4*B*S*16")


def test_the_command_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    """`preflop account --formulas`: a section, and a key of the JSON."""
    words = "account gpt2-nano --batch 6 --seq 96 --precision bf16-mixed --device h100-sxm --formulas".split()
    assert run(words) == 0
    assert "2*B*S*128*" in capsys.readouterr().out
    assert run([*words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["formulas"]["axes"]["hidden"] == 128
    assert len(said["formulas"]["operators"]) == len(said["operators"])


def test_a_batch_without_sizes_has_no_formulas() -> None:
    """A batch of one's own cannot be written in B and S: one clear message."""
    import torch

    with pytest.raises(BadSubject, match="formulas need a batch whose sizes can be changed"):
        formulas(torch.nn.Linear(2, 2), torch.zeros(3, 2))


def test_beyond_the_table_is_the_models_own_error() -> None:
    """A sequence longer than the positions: the same message as for the account, status 2."""
    assert run("account gpt2-nano --batch 2 --seq 300 --device h100-sxm --formulas".split()) == 2
