"""Named products: FLOPs and bytes are those of what torch runs, forward and backward."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import preflop
from preflop.cli.main import run
from preflop.errors import BadExpression, PreflopError
from preflop.formulas.einsum import contraction_order, parse, products, written_order

SIZES = {"b": 2, "s": 3, "d": 5, "f": 7, "h": 4, "g": 6}


def tensors(text: str, sizes: dict[str, int]) -> list[torch.Tensor]:
    left = text.partition("->")[0]
    return [torch.randn([sizes[a] for a in part.split()], requires_grad=True) for part in left.split(",")]


def glued(text: str) -> str:
    return text.replace(" ", "")


def recorded_flops(text: str, sizes: dict[str, int], backward: bool) -> int:
    """FLOPs of matmuls that torch runs for the expression."""
    operands = tensors(text, sizes)
    weight = torch.ones(())

    def call():
        out = torch.einsum(glued(text), *operands)
        if backward:
            torch.autograd.grad(out, operands, (weight.expand(out.shape),))

    tape = preflop.record(call)
    return preflop.flops_ledger(tape).by("op").get("aten.bmm", 0)


CASES = [
    "b s d, d f -> b s f",
    "b h s d, b h g d -> b h s g",
    "b s d, d f -> f s b",
    "s d, d -> s",
    "b s d, f s -> b d f",
]


@pytest.mark.parametrize("text", CASES)
def test_forward_is_what_torch_multiplies(text):
    """FLOPs of forward equal those of the bmm that torch.einsum runs, per the tape."""
    sizes = {a: SIZES[a] for a in SIZES if a in text}
    assert preflop.einsum_cost(text, sizes).forward.flops == recorded_flops(text, sizes, False)


@pytest.mark.parametrize("text", CASES)
def test_backward_is_what_torch_multiplies(text):
    """Forward and both gradients equal the bmms of forward and backward on the tape."""
    sizes = {a: SIZES[a] for a in SIZES if a in text}
    cost = preflop.einsum_cost(text, sizes)
    whole = cost.forward.flops + sum(gradient.flops for gradient in cost.backward)
    assert whole == recorded_flops(text, sizes, True)


@pytest.mark.parametrize(
    "text",
    [*CASES, "b s d, d -> b s d", "b s d, d f -> b f", "b d, s d, d -> b s", "b s, s d, d f, f h -> b h"],
)
def test_gradients_are_gradients(text):
    """Each gradient's expression, evaluated, is the operand's gradient as autograd computes it."""
    sizes = {a: SIZES[a] for a in SIZES if a in text.split("->")[0].replace(",", " ").split()}
    operands = tensors(text, sizes)
    expression = parse(text, sizes)
    if len(operands) > 2:
        return check_chain(expression, operands)
    out = torch.einsum(glued(text), *operands)
    given_grad = torch.randn_like(out)
    wanted = torch.autograd.grad(out, operands, given_grad)
    from preflop.formulas.einsum import gradient

    for number in range(2):
        asked, _ = gradient(expression, number)
        other = operands[1 - number]
        pair = (given_grad, other) if number == 0 else (other, given_grad)
        lone = [
            a
            for a in expression.operands[1 - number]
            if a not in expression.operands[number] and a not in expression.result
        ]
        if lone:
            axes = expression.operands[1 - number]
            reduced = other.sum([axes.index(a) for a in lone])
            pair = (given_grad, reduced) if number == 0 else (reduced, given_grad)
        found = torch.einsum(glued(asked.text), *pair)
        axes = expression.operands[number]
        view = [sizes[a] if a in asked.result else 1 for a in axes]
        torch.testing.assert_close(found.reshape(view).expand_as(wanted[number]), wanted[number])
    return None


def check_chain(expression, operands):
    """The steps, run one after another, give the whole expression."""
    held = {f"operand {n + 1}": t for n, t in enumerate(operands)}
    for number, pair in enumerate(contraction_order(expression)):
        held[f"step {number + 1}"] = torch.einsum(
            glued(pair.expression.text), *(held[name] for name in pair.names)
        )
    torch.testing.assert_close(
        held[f"step {len(operands) - 1}"], torch.einsum(glued(expression.text), *operands)
    )


def test_the_issues_example():
    """(16384, 4096) @ (4096, 14336) in bf16: 2mkn FLOPs, each matrix once, intensity 2667, compute bound."""
    cost = preflop.einsum_cost("b s d, d f -> b s f", b=8, s=2048, d=4096, f=14336, device="h100-sxm")
    m, k, n = 8 * 2048, 4096, 14336
    assert cost.forward.flops == 2 * m * k * n
    assert (cost.forward.read_bytes, cost.forward.write_bytes) == (2 * (m * k + k * n), 2 * m * n)
    assert cost.forward.bound == "compute"
    assert cost.ridge_point == pytest.approx(295, abs=1)
    assert cost.forward.time_s == pytest.approx(2 * m * k * n / 989.4e12, rel=1e-3)
    assert [g.flops for g in cost.backward] == [2 * m * k * n] * 2
    assert [g.operand for g in cost.backward] == ["b s d", "d f"]


def test_a_small_matmul_is_bound_by_bandwidth():
    """One token against a weight moves the weight for 2 FLOPs an element: bandwidth is the bound."""
    cost = preflop.einsum_cost("b d, d f -> b f", b=1, d=4096, f=4096, device="h100-sxm")
    assert cost.forward.bound == "bandwidth"
    moved = cost.forward.read_bytes + cost.forward.write_bytes
    assert cost.forward.time_s == pytest.approx(moved / 3.35e12, rel=1e-3)


def test_the_cheapest_order_is_found():
    """x (A B) C: the vector first. From left to right (A B) costs 2e9, the best order 2 * 2e6 + 2e3."""
    sizes = {"a": 1000, "b": 1000, "c": 1000, "d": 1}
    expression = parse("a b, b c, c d -> a d", sizes)
    best = sum(p.flops for pair in contraction_order(expression) for p in products(pair.expression))
    naive = sum(p.flops for pair in written_order(expression) for p in products(pair.expression))
    assert (best, naive) == (2 * 2 * 10**6, 2 * 10**9 + 2 * 10**6)
    assert preflop.einsum_cost(expression.text, sizes).written_order_flops == naive


def test_bytes_per_element_follow_the_dtype():
    """fp8 operands take one byte; a bf16 result of theirs takes two."""
    cost = preflop.einsum_cost("m k, k n -> m n", m=4, k=8, n=16, dtype="fp8", out_dtype="bf16")
    assert (cost.forward.read_bytes, cost.forward.write_bytes) == (4 * 8 + 8 * 16, 2 * 4 * 16)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_cost_grows_with_every_axis(data):
    """Doubling an axis never lowers FLOPs, bytes or the lower bound of time."""
    text = data.draw(st.sampled_from(CASES))
    sizes = {a: SIZES[a] for a in SIZES if a in text}
    axis = data.draw(st.sampled_from(sorted(sizes)))
    before = preflop.einsum_cost(text, sizes, device="a100").forward
    after = preflop.einsum_cost(text, {**sizes, axis: 2 * sizes[axis]}, device="a100").forward
    assert after.flops >= before.flops
    assert after.read_bytes + after.write_bytes >= before.read_bytes + before.write_bytes
    assert after.time_s >= before.time_s


@pytest.mark.parametrize(
    ("text", "sizes", "said"),
    [
        ("b s d, d f", {}, "no arrow"),
        ("b d, d f -> b f", {"b": 1, "d": 2}, "no size for f"),
        ("b d, d f -> b f", {"b": 1, "d": 2, "f": 3, "x": 4}, "no axis x"),
        ("b b, b f -> b f", {"b": 1, "f": 3}, "stands twice"),
        ("b d, d f -> b z", {"b": 1, "d": 2, "f": 3, "z": 3}, "no operand has the axis z"),
        ("b d, d f -> b f", {"b": 0, "d": 2, "f": 3}, "1 or more"),
        ("b ..., d f -> b f", {"b": 1, "d": 2, "f": 3}, "'...' is no axis"),
    ],
)
def test_what_cannot_be_priced_is_said(text, sizes, said):
    """A text that cannot be read is refused with what is wrong in it, never priced."""
    with pytest.raises(PreflopError, match=said):
        preflop.einsum_cost(text, sizes)


def test_unknown_dtype_is_said():
    """No size is guessed for a dtype that is not known."""
    with pytest.raises(BadExpression, match="no dtype named 'bf17'"):
        preflop.einsum_cost("a b -> b a", a=1, b=2, dtype="bf17")


def test_letters_without_blanks_are_axes():
    """Read as torch reads it, "bsd,df->bsf" has one-letter axes; a word that has a size is one axis."""
    assert parse("bsd,df->bsf", {"b": 1, "s": 2, "d": 3, "f": 4}).text == "b s d, d f -> b s f"
    assert parse("seq,seq->seq", {"seq": 4}).text == "seq, seq -> seq"


def test_command_gives_the_contracts_json(capsys):
    """`preflop einsum --json`: forward and backward with the keys that the issue names."""
    words = [
        "einsum",
        "b s d, d f -> b s f",
        "b=8",
        "s=2048",
        "d=4096",
        "f=14336",
        "--device",
        "h100-sxm",
        "--json",
    ]
    assert run(words) == 0
    found = json.loads(capsys.readouterr().out)
    keys = {"expression", "flops", "read_bytes", "write_bytes", "arithmetic_intensity", "bound", "time_s"}
    assert keys <= set(found["forward"])
    assert all(keys | {"operand"} <= set(gradient) for gradient in found["backward"])
    assert found["forward"]["flops"] == 2 * 8 * 2048 * 4096 * 14336


def test_command_says_what_is_wrong(capsys):
    """A size that is no AXIS=SIZE ends with status 2 and one message."""
    assert run(["einsum", "a b -> b a", "a", "b=2"]) == 2
    assert "Needed: AXIS=SIZE" in capsys.readouterr().err
