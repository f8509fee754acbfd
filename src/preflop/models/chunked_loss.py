"""The head and the cross entropy of a model in chunks of positions: all logits never exist at once.

Source: Liger's fused linear cross entropy (Hsu et al. 2024, arXiv 2410.10989, section 3.2;
ops/fused_linear_cross_entropy.py), which makes the gradients in forward, chunk by chunk. What its Triton
kernel does inside the chunk's logits is written out in torch's operators here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from preflop.models.loss import IGNORED_LABEL


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    chunks: int,
    next_token: bool = False,
) -> Tensor:
    """Mean cross entropy in fp32 of `hidden @ weight.T + bias` against labels, ignoring label -100.

    Args:
        hidden: (..., features).
        weight: (classes, features).
        labels: int64, the leading shape of `hidden`.
        chunks: equal parts (the last may be smaller) in which rows go through the head.
        next_token: each position's label is the next one's; the last position is ignored.

    >>> hidden, weight, labels = torch.randn(6, 4), torch.randn(10, 4), torch.arange(6)
    >>> whole = functional.cross_entropy(hidden @ weight.T, labels)
    >>> torch.allclose(chunked_cross_entropy(hidden, weight, labels, chunks=3), whole)
    True
    """
    if next_token:
        labels = functional.pad(labels, (0, 1), value=IGNORED_LABEL)[:, 1:]
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    with torch.autocast(kind, enabled=False):
        return _HeadAndLoss.apply(
            hidden.reshape(-1, hidden.shape[-1]), weight, bias, labels.reshape(-1), chunks
        )


class _HeadAndLoss(torch.autograd.Function):
    """Loss of all rows; their gradients are made beside it."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, chunks: int
    ) -> Tensor:
        wanted = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if wanted[0] else None
        grad_weight = torch.zeros_like(weight) if wanted[1] else None
        grad_bias = torch.zeros_like(bias) if bias is not None and wanted[2] else None
        loss = hidden.new_zeros((), dtype=torch.float32)
        counted = (labels != IGNORED_LABEL).sum()
        for index, (rows, target) in enumerate(zip(hidden.chunk(chunks), labels.chunk(chunks))):
            kept = target != IGNORED_LABEL
            column = torch.where(kept, target, 0)[:, None]
            share = (kept / counted)[:, None]
            scores = functional.log_softmax(functional.linear(rows, weight, bias).float(), dim=-1)
            loss.sub_((scores.gather(1, column) * share).sum())
            if not any(wanted):
                continue
            # softmax - one_hot(label), each row by its share of the mean
            slope = scores.exp_().mul_(share).scatter_add_(1, column, -share).to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(slope, weight, out=grad_hidden.chunk(chunks)[index])
            if grad_weight is not None:
                grad_weight.addmm_(slope.t(), rows)
            if grad_bias is not None:
                grad_bias.add_(slope.sum(0))
            del scores, slope
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return (*(None if one is None else one.mul_(grad) for one in ctx.saved_tensors), None, None)

