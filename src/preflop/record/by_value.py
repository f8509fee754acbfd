"""Calls whose result depends on values, when some of their tensors are fake.

A real boolean mask that indexes a fake tensor has a known number of true elements: it is turned into
integer indices first, for reading, writing and backward alike. What depends on fake floats is assumed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from preflop.errors import BadSubject
from preflop.record.assume import DIFFERENT, assumed_number
from preflop.units import a_dtype

if TYPE_CHECKING:
    from preflop.record.recorder import Recorder

aten = torch.ops.aten


def run(
    recorder: Recorder, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]
) -> Any:
    """Run one such call."""
    if func is aten._local_scalar_dense.default or func is aten.is_nonzero.default:
        return _number(recorder, args[0])
    if func is aten.equal.default:
        recorder.assumed("equality of tensors that are not computed: taken as false.")
        return False
    if func is aten.nonzero.default:
        shape = (_count(recorder, args[0]), args[0].ndim)
        # Kernels write the indices one dimension after the other (native/TensorAdvancedIndexing.cpp).
        return _fresh(recorder, "aten.nonzero", args, shape, torch.int64, (1, max(shape[0], 1)))
    if func is aten.masked_select.default:
        return _masked_select(recorder, args)
    if func is aten.repeat_interleave.Tensor:
        return _repeat_interleave(recorder, args, kwargs)
    if func is aten._pack_padded_sequence.default:
        return _pack(recorder, args)
    return _index(recorder, func, args, kwargs)


def _number(recorder: Recorder, tensor: torch.Tensor) -> Any:
    if tensor.dtype is torch.bool and recorder.maker(tensor) in _ALL:
        recorder.assumed(
            "a check that floats which are not computed are all as they should be: taken as true."
        )
        return True
    value = assumed_number(tensor.dtype)
    kind = a_dtype(str(tensor.dtype).removeprefix("torch."))
    line = recorder.origins.line_now()
    at = f" at {line}" if line else ""
    other = "; what another answer would run is not priced" if tensor.dtype is torch.bool else ""
    recorder.assumed(f"{kind} read back by .item(){at}: taken as {value}{other}.")
    return value


# `if not valid.all(): raise` guards against what a training step does not meet.
_ALL = ("aten.all", "aten._is_all_true")


def check_indices(func: Any, args: Any) -> None:
    """Ids that are known must be rows of their table: a fake kernel would not notice.

    Raises:
        BadSubject: an id is outside.
    """
    if func is aten.nll_loss_forward.default or func is aten.nll_loss2d_forward.default:
        ignored = args[4]
        ids, rows, what = args[1], args[0].shape[1 if args[0].ndim > 1 else 0], "a target class"
        if type(ids) is not FakeTensor:
            ids = ids[ids != ignored]
    elif func is aten.embedding.default or func is aten._embedding_bag.default:
        ids, rows, what = args[1], args[0].shape[0], "an index"
    else:
        ids, rows, what = args[2], args[0].shape[args[1]] if args[0].ndim else 1, "an index"
    if type(ids) is FakeTensor or ids.device.type != "cpu" or not ids.numel():
        return
    low, high = (int(value) for value in torch.aminmax(ids))
    if low < 0 or high >= rows:
        raise BadSubject(
            f"{what} is {low if low < 0 else high}, outside of the {rows} that there are "
            f"({str(func).removesuffix('.default')} with ids {tuple(ids.shape)}).\n"
            "  Ids start at 0: give a batch inside the vocabulary, or a shorter sequence where this is a "
            "table of positions."
        )


CHECKED = {
    aten.embedding.default,
    aten._embedding_bag.default,
    aten.nll_loss_forward.default,
    aten.nll_loss2d_forward.default,
    aten.gather.default,
    aten.index_select.default,
}
"""Operators whose integer arguments `check_indices` reads."""


def _count(recorder: Recorder, mask: torch.Tensor) -> int:
    if type(mask) is not FakeTensor:
        return int(mask.count_nonzero().item())
    made_by = recorder.maker(mask)
    if made_by in _EQUALITIES:
        recorder.assumed(DIFFERENT)
        return mask.numel() if made_by == "aten.ne" else 0
    recorder.assumed("a mask computed from floats selects by values: taken as half of its elements.")
    return mask.numel() // 2


_EQUALITIES = ("aten.eq", "aten.ne")
"""`pixels == 0` finds padding, which a batch need not have; other comparisons halve."""


def _masked_select(recorder: Recorder, args: Any) -> torch.Tensor:
    source, mask = args
    shape = torch.broadcast_shapes(source.shape, mask.shape)
    known = type(mask) is not FakeTensor
    count = int(mask.expand(shape).count_nonzero().item()) if known else _count(recorder, mask)
    return _fresh(recorder, "aten.masked_select", args, (count,), source.dtype)


def _pack(recorder: Recorder, args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a padded batch that are no padding, and how many sequences reach each position."""
    padded, lengths, batch_first = args
    if type(lengths) is FakeTensor:
        raise BadSubject(
            "pack_padded_sequence with lengths that are computed from floats cannot be recorded.\n"
            "  Give the lengths as integers."
        )
    positions = torch.arange(int(lengths.max()))
    batch_sizes = (lengths[None] > positions[:, None]).sum(1)
    width = padded.shape[2:]
    del batch_first  # the sizes are the same either way
    dense = recorder.kernels.empty(
        (int(lengths.sum()), *width), _dense_stride((1, *width)), padded.dtype
    )
    recorder.made("aten._pack_padded_sequence", args, [dense, batch_sizes], None)
    return dense, batch_sizes


def _dense_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides))


def _fresh(
    recorder: Recorder, op: str, args: Any, shape: tuple[int, ...], dtype: torch.dtype,
    stride: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """A fresh result whose size was learned from values."""
    made = recorder.kernels.empty(shape, stride or _dense_stride(shape), dtype)
    recorder.made(op, tuple(args), [made], None)
    return made


def _repeat_interleave(recorder: Recorder, args: Any, kwargs: Any) -> torch.Tensor:
    repeats = args[0]
    size = kwargs.get("output_size")
    if size is None:
        if type(repeats) is FakeTensor:
            raise BadSubject(
                "repeat_interleave with counts that are computed from floats cannot be recorded.\n"
                "  Give it output_size=..."
            )
        size = int(repeats.sum().item())
    return _fresh(recorder, "aten.repeat_interleave", args, (size,), repeats.dtype)


def _index(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    source, indices = args[0], args[1]
    known: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            known.append(index)
            continue
        # nonzero of a mask makes one (n, dims) tensor inside the kernel; the indices are its columns.
        if type(index) is FakeTensor:
            found = torch.zeros(index.ndim, _count(recorder, index), dtype=torch.int64).t()
        else:
            found = index.nonzero()
        if recorder.recording:
            recorder.table.born(found, len(recorder.calls))
        known.extend(found[:, dim] for dim in range(index.ndim))
    return recorder.planned(func, (source, known, *args[2:]), kwargs)
