"""What a failed recording leaves behind: nothing, whatever was raised and wherever it struck."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

import preflop
from preflop.errors import BadSubject
from preflop.record.recorder import Recorder


def _state() -> tuple[int, bool, bool]:
    """How many dispatch modes are active, whether torch believes so, and whether gradients are on."""
    return (
        torch._C._len_torch_dispatch_stack(), _python_dispatch._is_in_torch_dispatch_mode,
        torch.is_grad_enabled(),
    )  # fmt: skip


def _check_healthy() -> None:
    assert _state() == (0, False, True)
    assert preflop.account(nn.Linear(4, 4), torch.zeros(2, 4)).flops.model == 2 * 2 * 2 * 4 * 4


def test_modes_that_an_error_kept_are_left() -> None:
    """A `with` block inside the recording whose own end did not come to run."""

    def fails() -> None:
        with Recorder() as recorder:
            TorchDispatchMode.__enter__(recorder)
            torch.set_grad_enabled(False)
            raise RecursionError

    with pytest.raises(RecursionError):
        fails()
    _check_healthy()


def _deep(x: Any) -> Any:
    return torch.ops.preflop_test.deep(x)


def _from_depth(frames: int, x: torch.Tensor) -> None:
    """Record an operator without end, so many frames further down that the limit is struck elsewhere."""
    if frames:
        _from_depth(frames - 1, x)
        return
    with torch.inference_mode():
        preflop.record(_deep, x)


def test_an_operator_that_calls_itself() -> None:
    """The limit strikes in some `__exit__`; the next account is as ever."""
    library = torch.library.Library("preflop_test", "DEF")
    library.define("deep(Tensor x) -> Tensor")
    library.impl("deep", _deep, "CompositeImplicitAutograd")
    try:
        for frames in range(6):
            with pytest.raises(RecursionError):
                _from_depth(frames, torch.zeros(2))
            assert _state() == (0, False, True)
    finally:
        library._destroy()
    _check_healthy()


def test_attention_of_nested_tensors_is_refused_by_name() -> None:
    """Jagged attention asks for its layout first; the message names the line and the padding."""
    jagged = torch.nested.nested_tensor([torch.zeros(n, 8, 64) for n in (128, 64)], layout=torch.jagged)
    query = jagged.transpose(1, 2)
    with pytest.raises(BadSubject, match=r"(?s)nested tensor at .*test_cleaned_up.py.*to_padded_tensor"):
        preflop.record(lambda: nn.functional.scaled_dot_product_attention(query, query, query))
    _check_healthy()


def test_products_of_nested_tensors_are_refused_by_name() -> None:
    """A linear of a jagged tensor; its layout can be asked for."""
    jagged = torch.nested.nested_tensor([torch.zeros(n, 8) for n in (3, 2)], layout=torch.jagged)
    linear = nn.Linear(8, 4)

    def product() -> Any:
        assert jagged.layout is torch.jagged
        return linear(jagged)

    with pytest.raises(BadSubject, match=r"(?s)nested tensor.*to_padded_tensor"):
        preflop.record(product)
    _check_healthy()


def test_a_recording_inside_a_recording_is_refused() -> None:
    """`preflop.account` called by the model's forward: one clear message, and nothing left behind."""

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            preflop.account(self.inner, x)
            return self.inner(x)

    with pytest.raises(BadSubject, match=r"(?s)called inside a step that it records.*outside of the model's forward"):
        preflop.account(Asks(), torch.zeros(2, 4))
    _check_healthy()
