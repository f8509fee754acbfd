"""Higher-order operators: torch hands them over whole. flex_attention is recorded as the one kernel that
it is when compiled, forward and backward; its score and mask functions are programs inside that kernel.

Source of the outputs: torch/_inductor/kernel/flex/flex_attention.py (output, logsumexp in fp32, and the
largest scores where they are asked for).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from preflop.errors import BadSubject
from preflop.record.fake import INTEGER_LIMIT_BYTES

if TYPE_CHECKING:
    from preflop.record.recorder import Recorder

FORWARD, BACKWARD = "higher_order.flex_attention", "higher_order.flex_attention_backward"


def run_higher_order(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """A higher-order call that reached the dispatcher: not one that can be recorded."""
    name = func.name() if callable(getattr(func, "name", None)) else str(func)
    del recorder, args, kwargs
    hint = "Call the plain PyTorch code that it was made from."
    if name == "flex_attention":
        hint = "Import torch.nn.attention.flex_attention before recording (at the top of the file)."
    raise BadSubject(f"cannot record the higher-order operator {name}.\n  {hint}")


def flex_attention(
    has_max: bool,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Any,
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    score_buffers: tuple[Any, ...] = (),
    mask_buffers: tuple[Any, ...] = (),
) -> tuple[torch.Tensor, ...]:
    """Stands for torch's higher-order operator while recording.

    Args:
        has_max: whether this torch's operator also returns the largest scores (since 2.9).
    """
    recorder = _recorder()
    learned = [*_captured(score_mod), *score_buffers]
    extra = [t for t in (*block_mask, *mask_buffers) if isinstance(t, torch.Tensor)]
    pairs = _attended_pairs(query, key, block_mask)
    wants_max = has_max and bool(kernel_options.get("OUTPUT_MAX"))
    outputs = _Flex.apply(recorder, scale, pairs, wants_max, extra, query, key, value, *learned)
    if has_max and not wants_max:
        return (*outputs, *_make(recorder, [((0,), (1,), torch.float32)]))
    return tuple(outputs)


class _Flex(torch.autograd.Function):
    """One recorded call forward and one backward."""

    @staticmethod
    def forward(
        ctx: Any,
        recorder: Recorder,
        scale: float,
        pairs: int | None,
        wants_max: bool,
        extra: list[torch.Tensor],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *learned: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        rows = tuple(query.shape[:-1])
        shape = (*rows, value.shape[-1])
        statistics = [(rows, _dense(rows), torch.float32)] * (2 if wants_max else 1)
        outputs = _make(recorder, [(shape, _like_query(shape, query), query.dtype), *statistics])
        recorder.made(FORWARD, (query, key, value, scale, *extra, *learned), outputs, pairs)
        ctx.recorder, ctx.scale, ctx.pairs, ctx.extra, ctx.learned = recorder, scale, pairs, extra, learned
        ctx.save_for_backward(query, key, value, *outputs[:2])
        ctx.set_materialize_grads(False)
        if wants_max:
            ctx.mark_non_differentiable(outputs[2])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        recorder: Recorder = ctx.recorder
        query, key, value, out, logsumexp = ctx.saved_tensors
        wanted = [(tuple(t.shape), t.stride(), t.dtype) for t in (query, key, value)]
        wanted += [(tuple(t.shape), _dense(tuple(t.shape)), t.dtype) for t in ctx.learned]
        gradients = _make(recorder, wanted)
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        inputs = (query, key, value, out, logsumexp, grad_out, ctx.scale, *ctx.extra, *ctx.learned)
        recorder.made(BACKWARD, inputs, gradients, ctx.pairs)
        return (None, None, None, None, None, *gradients)


def _make(recorder: Recorder, wanted: list[tuple[Any, Any, torch.dtype]]) -> list[torch.Tensor]:
    """Fake tensors of the given (shape, stride, dtype)s; making them is no call of the step."""
    with _disable_current_modes():
        return [recorder.kernels.empty(*one) for one in wanted]


def _recorder() -> Recorder:
    from preflop.record.recorder import Recorder as Kind

    return next(m for m in reversed(_get_current_dispatch_mode_stack()) if isinstance(m, Kind))


def _captured(score_mod: Any) -> list[torch.Tensor]:
    """Tensors of the score function's closure that learn: the kernel makes their gradients too."""
    cells = getattr(score_mod, "__closure__", None) or ()
    held = [cell.cell_contents for cell in cells]
    return [item for item in held if isinstance(item, torch.Tensor) and item.requires_grad]


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _like_query(shape: tuple[int, ...], query: torch.Tensor) -> tuple[int, ...]:
    """Dense strides in the order of the query's dimensions, the last one innermost."""
    order = sorted(range(len(shape) - 1), key=query.stride)
    strides = [1] * len(shape)
    step = shape[-1]
    for dim in order:
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


def _attended_pairs(
    query: torch.Tensor, key: torch.Tensor, block_mask: tuple[Any, ...]
) -> int | None:
    """(query, key) pairs that the mask function leaves, summed over the batch and averaged over heads;
    None where it is too large to be evaluated or depends on tensors that are not computed."""
    from torch.nn.attention import flex_attention as flex

    mask_mod = block_mask[-1]
    if mask_mod is flex.noop_mask:
        return None
    batch, heads, queries, keys = query.shape[0], query.shape[1], query.shape[-2], key.shape[-2]
    counts = next((t for t in block_mask if isinstance(t, torch.Tensor)), None)
    own_batch, own_heads = (batch, heads) if counts is None else (counts.shape[0], counts.shape[1])
    if own_batch * own_heads * queries * keys > INTEGER_LIMIT_BYTES:
        return None
    try:
        with _disable_current_modes():
            mask = flex.create_mask(mask_mod, own_batch, own_heads, queries, keys, device="cpu")
            attended = int(mask.sum().item())
    except Exception:
        return None  # a mask that reads tensors which are not computed
    return attended * (batch // own_batch) // own_heads
