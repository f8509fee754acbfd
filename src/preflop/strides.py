"""Shapes and strides: when a tensor's elements can be seen in another shape without moving them.

Plain integer arithmetic, no torch; sizes and strides are in elements.
"""

from __future__ import annotations

Sizes = tuple[int, ...]


def contiguous_strides(shape: Sizes) -> Sizes:
    """Strides of a contiguous tensor.

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def lies_contiguous(shape: Sizes, strides: Sizes) -> bool:
    """Whether the elements lie in the order of the shape, without gaps (axes of size 1 do not matter).

    >>> lies_contiguous((2, 1, 4), (4, 99, 1)), lies_contiguous((4, 2), (1, 4))
    (True, False)
    """
    if 0 in shape:
        return True
    wanted = contiguous_strides(shape)
    return all(n == 1 or s == w for n, s, w in zip(shape, strides, wanted, strict=True))


def repeats(shape: Sizes, strides: Sizes) -> bool:
    """Whether an axis is expanded: stride 0 over more than one position."""
    return any(stride == 0 and size > 1 for size, stride in zip(shape, strides, strict=True))


def is_permuted(shape: Sizes, strides: Sizes) -> bool:
    """Whether an axis lies in memory outside of one that comes before it in the shape.

    >>> is_permuted((2, 3), (1, 2)), is_permuted((2, 3), (9, 1))
    (True, False)
    """
    steps = [stride for size, stride in zip(shape, strides, strict=True) if size > 1 and stride]
    return any(later > earlier for earlier, later in zip(steps, steps[1:], strict=False))


def view_strides(shape: Sizes, strides: Sizes, wanted: Sizes) -> Sizes | None:
    """Strides with which the same memory shows `wanted`; None where no strides do and a copy is needed.

    Neighbouring axes can be merged when one step of the outer equals a walk over the inner; an axis can
    always be split.

    >>> view_strides((2, 3, 4), (12, 4, 1), (6, 4))
    (4, 1)
    >>> view_strides((8, 1024, 12, 64), (786432, 64, 65536, 1), (8, 1024, 768)) is None
    True

    Source: ATen/TensorUtils.cpp, computeStride.
    """
    if 0 in shape:
        return contiguous_strides(wanted)
    found = [0] * len(wanted)
    at = len(wanted) - 1
    inner_stride = strides[-1] if strides else 1
    held = asked = 1
    for axis in range(len(shape) - 1, -1, -1):
        held *= shape[axis]
        ends = axis == 0 or (shape[axis - 1] != 1 and strides[axis - 1] != held * inner_stride)
        if not ends:
            continue
        while at >= 0 and (asked < held or wanted[at] == 1):
            found[at] = asked * inner_stride
            asked *= wanted[at]
            at -= 1
        if asked != held:
            return None
        if axis:
            inner_stride, held, asked = strides[axis - 1], 1, 1
    if not shape:
        return tuple(1 for _ in wanted)
    return tuple(found) if at < 0 else None


def is_channels_last(shape: Sizes, strides: Sizes) -> bool:
    """Whether torch takes a tensor of 4 or 5 axes to be channels last: channels innermost, then the last
    axis, outwards to the batch.

    >>> is_channels_last((2, 3, 8, 8), (192, 1, 24, 3)), is_channels_last((2, 3, 8, 8), (192, 64, 8, 1))
    (True, False)

    Source: c10/core/MemoryFormat.h, is_channels_last_strides_2d and _3d.
    """
    if len(shape) not in (4, 5) or strides[1] == 0:
        return False
    least = 0
    for axis in (1, *range(len(shape) - 1, 1, -1), 0):
        if shape[axis] == 0 or strides[axis] < least:
            return False
        if axis == 0 and least == strides[1]:
            return False
        least = strides[axis] * max(shape[axis], 1)
    return True
