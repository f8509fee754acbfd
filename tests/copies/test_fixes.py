"""What the rows say to write instead removes the copy, and leaves outputs and gradients equal."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import preflop
from preflop.ledgers.copies import copy_rows

B, H, G, S, D = 2, 8, 2, 16, 32


def broadcast():
    """A broadcast operand of matmul, folded into the rows by einsum."""
    a, b = torch.randn(64, 16, 1, 32), torch.randn(16, 32, 32)
    return (a, b), lambda a, b: a @ b, lambda a, b: torch.einsum("bhid,hde->bhie", a, b)


def repeat():
    """Key and value heads written out for each query head, against enable_gqa."""
    q, k, v = torch.randn(B, H, S, D), torch.randn(B, G, S, D), torch.randn(B, G, S, D)

    def expanded(q, k, v):
        def out(t):
            return t[:, :, None].expand(B, G, H // G, S, D).reshape(B, H, S, D)

        return F.scaled_dot_product_attention(q, out(k), out(v))

    return (q, k, v), expanded, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def cut():
    """Logits cut before the loss, against labels shifted."""
    logits, labels = torch.randn(B, S, 100), torch.randint(0, 100, (B, S))

    def before(logits):
        return F.cross_entropy(logits[:, :-1].reshape(-1, 100), labels[:, 1:].reshape(-1))

    def after(logits):
        shifted = torch.full_like(labels, -100)
        shifted[:, :-1] = labels[:, 1:]
        return F.cross_entropy(logits.view(-1, 100), shifted.view(-1))

    return (logits,), before, after


def merge():
    """Heads merged after attention by hand, against scaled_dot_product_attention's layout."""
    q, k, v = torch.randn(B, S, H, D), torch.randn(B, S, H, D), torch.randn(B, S, H, D)

    def by_hand(q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        weights = (q @ k.transpose(-1, -2) / D**0.5).softmax(-1)
        return (weights @ v).transpose(1, 2).reshape(B, S, H * D)

    def fused(q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, S, H * D)

    return (q, k, v), by_hand, fused


def contiguous():
    """Left out: a call of contiguous before an element-wise operator."""
    x, y = torch.randn(64, 32), torch.randn(32, 64)
    return (x, y), lambda x, y: torch.sin(x.t().contiguous()) * y, lambda x, y: torch.sin(x.t()) * y


def square():
    """x ** 2, whose gradient copies x, against x * x."""
    x = torch.randn(64, 32)
    return (x,), lambda x: x**2, lambda x: x * x


def fill():
    """masked_fill, which begins with a copy, against in place on a result that nobody else needs."""
    x, mask = torch.randn(64, 32), torch.rand(64, 32) > 0.5
    return (
        (x,),
        lambda x: torch.exp(x * 3).masked_fill(mask, 0.0).sin(),
        lambda x: torch.where(mask, 0.0, torch.exp(x * 3)).sin(),
    )


def pieces():
    """Three slices of one tensor, whose gradients are written into zeros, against one chunk."""
    x = torch.randn(64, 96)

    def sliced(x):
        return x[:, :32] * x[:, 32:64] + x[:, 64:]

    def chunked(x):
        a, b, c = x.chunk(3, dim=1)
        return a * b + c

    return (x,), sliced, chunked


FIXES = {
    "broadcast": broadcast,
    "repeat": repeat,
    "slice": cut,
    "reshape": merge,
    "matmul": merge,
    "contiguous": contiguous,
    "copy": square,
    "clone": fill,
    "slice-gradient": pieces,
}
# Below this a copy is no point: a few labels, a row.
SMALL_BYTES = 1024


def run(function, inputs):
    """The result and the inputs' gradients."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    result = function(*leaves)
    weights = torch.linspace(0.5, 1.5, result.numel()).view(result.shape)
    return result, torch.autograd.grad((result * weights).sum(), leaves)


def kinds(function, inputs) -> dict[str, int]:
    """Bytes that forward and backward copy, by kind."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    grad = torch.ones_like(function(*leaves))

    def step():
        return torch.autograd.grad(function(*leaves), leaves, (grad,))

    found: dict[str, int] = {}
    for row in copy_rows(preflop.record(step)):
        if row.bytes >= SMALL_BYTES:
            found[row.kind] = found.get(row.kind, 0) + row.bytes
    return found


@pytest.mark.parametrize("kind", FIXES)
def test_rewriting_as_told_removes_the_copy(kind):
    """The copy is on the tape before and not after; outputs and gradients are equal."""
    inputs, before, after = FIXES[kind]()
    name = kind.removesuffix("-gradient")
    copied, left = kinds(before, inputs), kinds(after, inputs)
    assert copied.get(name, 0) > 0, copied
    assert left.get(name, 0) == 0, left
    for was, now in zip(run(before, inputs)[1], run(after, inputs)[1], strict=True):
        torch.testing.assert_close(was, now, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(run(before, inputs)[0], run(after, inputs)[0], rtol=1e-4, atol=1e-5)
