"""The general rule for bytes moved: each distinct storage range read or written, once.

That is what an ideal kernel, not fused with its neighbours, moves between memory and the chip. Views
move nothing; an expanded (stride 0) axis is read once; a slice moves its own elements only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from preflop.ops.arguments import is_out_variant, is_sparse, stored_elements
from preflop.ops.registry import Moved
from preflop.tape.events import Signature, TensorMeta

NOTHING = Moved(0, 0)

# Return memory without touching it.
UNTOUCHED = frozenset(
    f"aten.{name}"
    for name in (
        "empty empty_like empty_strided empty_permuted new_empty new_empty_strided resize_ resize_as_ "
        "set_ record_stream _version"
    ).split()
)
# Take only the shape or dtype of their inputs and write every element of the result.
WRITE_ONLY = frozenset(
    f"aten.{name}"
    for name in (
        "zeros_like ones_like full_like new_zeros new_ones new_full rand_like randn_like randint_like zero_ "
        "uniform_ normal_ random_ exponential_ geometric_ cauchy_ log_normal_ _foreach_zero_ "
        "zero _foreach_zero fill_ fill"
    ).split()
)
# Overwrite their first input and read only the others.
OVERWRITE = frozenset({"aten.copy_", "aten._foreach_copy_", "aten.bernoulli_", "aten.fill_"})


@lru_cache(maxsize=65536)
def layout(meta: TensorMeta) -> tuple[int, tuple[tuple[int, int], ...], int]:
    """Which bytes of its storage a tensor covers: (first byte, ((size, stride in bytes)...), end byte).

    Axes of size 1 and stride 0 are dropped and axes that continue each other are joined, so a tensor and
    its transpose have the same layout.

    >>> layout(TensorMeta((2, 3), (3, 1), 0, "float32"))
    (0, ((6, 4),), 24)
    >>> layout(TensorMeta((3, 2), (1, 3), 0, "float32")) == layout(TensorMeta((6,), (1,), 0, "float32"))
    True
    """
    item = meta.itemsize
    if is_sparse(meta):
        size = (stored_elements(meta) or meta.elements) * item
        return 0, ((size // item, item),), size
    axes = sorted((abs(st), n) for n, st in zip(meta.shape, meta.stride, strict=True) if n != 1 and st != 0)
    joined: list[tuple[int, int]] = []
    for stride, size in axes:
        if joined and joined[-1][1] * joined[-1][0] == stride:
            joined[-1] = (joined[-1][0] * size, joined[-1][1])
        else:
            joined.append((size, stride))
    first = meta.offset * item
    if meta.elements == 0:
        return first, (), first
    end = first + (sum((size - 1) * stride for size, stride in joined) + 1) * item
    return first, tuple((size, stride * item) for size, stride in joined), end


@lru_cache(maxsize=65536)
def distinct_bytes(meta: TensorMeta) -> int:
    """Distinct bytes of a tensor: repeated (stride 0) and overlapping elements count once.

    >>> distinct_bytes(TensorMeta((4, 8), (0, 1), 0, "float32"))
    32
    """
    if meta.elements == 0:
        return 0
    first, axes, end = layout(meta)
    covered = meta.itemsize
    for size, _ in axes:
        covered *= size
    return min(covered, end - first)


def union_bytes(metas: Sequence[TensorMeta], storages: Sequence[int]) -> int:
    """Distinct bytes of several tensors, where those of one storage may cover the same bytes.

    Tensors with the same layout count once. Different layouts of one storage add up, but never to more
    than the range they span (exact for slices that do not cross, as q, k, v cut from one tensor).
    """
    by_storage: dict[int, dict[object, tuple[int, int, int]]] = {}
    for meta, storage in zip(metas, storages, strict=True):
        key, covered = _covered(meta)
        if covered[-1]:
            by_storage.setdefault(storage, {})[key] = covered
    return sum(_span_capped(list(ranges.values())) for ranges in by_storage.values())


@lru_cache(maxsize=65536)
def _covered(meta: TensorMeta) -> tuple[object, tuple[int, int, int]]:
    """A tensor's layout, and (first byte, end, distinct bytes)."""
    first, axes, end = layout(meta)
    return (first, axes), (first, end, distinct_bytes(meta))


def _span_capped(ranges: list[tuple[int, int, int]]) -> int:
    """Bytes of ranges (first, end, covered) of one storage: per connected span, the sum of what is
    covered or the span, whichever is less."""
    if len(ranges) == 1:
        return ranges[0][-1]
    total, span_first, span_end, covered = 0, 0, -1, 0
    for first, end, count in sorted(ranges):
        if first < span_end:
            span_end, covered = max(span_end, end), covered + count
            continue
        total += min(covered, max(0, span_end - span_first))
        span_first, span_end, covered = first, end, count
    return total + min(covered, max(0, span_end - span_first))


def is_view(sig: Signature) -> bool:
    """True where the call returns only views of its inputs and writes nothing."""
    return not sig.writes and bool(sig.outputs) and all(alias is not None for alias in sig.aliases)


def read_inputs(sig: Signature) -> list[int]:
    """Indices of the inputs whose values the call reads."""
    if sig.op in WRITE_ONLY or sig.op in UNTOUCHED:
        return []
    skipped: set[int] = set()
    if is_out_variant(sig) or sig.op in OVERWRITE:
        skipped = set(sig.writes)
    return [index for index in range(len(sig.inputs)) if index not in skipped]


def general(sig: Signature, storages: Sequence[int] | None = None) -> Moved:
    """Bytes by the general rule.

    Args:
        storages: ids of the storages of inputs, then outputs; None takes every tensor to have its own.
    """
    if is_view(sig) or sig.op in UNTOUCHED:
        return NOTHING
    ids = storages if storages is not None else range(len(sig.inputs) + len(sig.outputs))
    reads = read_inputs(sig)
    read = union_bytes([sig.inputs[i] for i in reads], [ids[i] for i in reads])
    fresh = [i for i, alias in enumerate(sig.aliases) if alias is None]
    offset = len(sig.inputs)
    written: Iterable[TensorMeta] = [sig.inputs[i] for i in sig.writes] + [sig.outputs[i] for i in fresh]
    owners = [ids[i] for i in sig.writes] + [ids[offset + i] for i in fresh]
    return Moved(read, union_bytes(list(written), owners))
