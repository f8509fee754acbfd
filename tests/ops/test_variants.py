"""Kernels of one name, told apart by a call's arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import preflop
from preflop.ledgers.operators import operator_rows

A, B = torch.randn(4, 8), torch.randn(8, 6)


@pytest.mark.parametrize(
    ("call", "op", "variant"),
    [
        (lambda: A @ B, "aten.mm", "NN"),
        (lambda: A @ torch.randn(6, 8).t(), "aten.mm", "NT"),
        (lambda: torch.randn(8, 4).t() @ B, "aten.mm", "TN"),
        (lambda: torch.addmm(torch.randn(6), A, torch.randn(6, 8).t()), "aten.addmm", "NT"),
        (lambda: torch.nn.functional.gelu(A), "aten.gelu", ""),
        (lambda: torch.nn.functional.gelu(A, approximate="tanh"), "aten.gelu", "tanh"),
        (lambda: A**3, "aten.pow", "3"),
        (lambda: torch.exp(A), "aten.exp", ""),
        (lambda: torch.softmax(A, -1), "aten._softmax", ""),
        (lambda: torch.log_softmax(A, 0), "aten._log_softmax", "strided"),
        (lambda: A.clone(), "aten.clone", ""),
        (lambda: A.t().clone(), "aten.clone", ""),  # which keeps the strides
        (lambda: A.t().contiguous(), "aten.clone", "transposed"),
        (lambda: torch.empty(8, 4).copy_(A.t()), "aten.copy_", "transposed"),
    ],
)
def test_a_row_says_which_kernel_it_is(call: Callable[[], Any], op: str, variant: str) -> None:
    """A layout for matmuls, an approximation for GELU, an exponent for powers, what lies apart, else nothing."""
    (row,) = [row for row in operator_rows(preflop.record(call)) if row.op == op]
    assert (row.variant, row.tensors) == (variant, 1)


def test_a_list_says_how_many_tensors_it_holds() -> None:
    """A foreach call over three tensors works through three."""
    given = [torch.randn(4) for _ in range(3)]
    (row,) = operator_rows(preflop.record(lambda: torch._foreach_add_(given, 1.0)))
    assert (row.op, row.calls, row.tensors) == ("aten._foreach_add_", 1, 3)
