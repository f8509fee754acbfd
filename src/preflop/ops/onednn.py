"""Which convolutions torch hands to oneDNN, and what its strided kernel books for itself.

Sources: aten/src/ATen/native/Convolution.cpp, `ConvParams::use_mkldnn`; oneDNN v3.12,
src/cpu/x64/jit_brgemm_conv_bwd_utils.cpp (`init_conf`, `init_scratchpad`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from preflop.ops.workspace import thread_count, vector_bytes
from preflop.tape.events import TensorMeta
from preflop.units import AVX2_BYTES, DTYPE_BYTES

PAGE_BYTES = 4096
BATCH_ELEMENT_BYTES = 40
"""`brgemm_batch_element_t`: two addresses, two paddings and a flag of 8 bytes each."""
_BATCH_WORTH_ONE_THREAD = 16
_TINY_INPUT_ELEMENTS = 20_480
_SMALL_KERNEL = 3
"""The limits of `use_mkldnn`."""
NESTED_BYTES = 128
"""Alignment of a scratchpad inside another primitive's (memory_tracking.hpp)."""


def rounded(size: int, step: int) -> int:
    """The next multiple of a step.

    >>> rounded(24, 16)
    32
    """
    return -(-size // step) * step


def channel_block() -> int:
    """Channels of one block of oneDNN's layouts: the fp32 numbers of one vector register."""
    return vector_bytes() // DTYPE_BYTES["float32"]


def asks_onednn(
    x: TensorMeta, weight: TensorMeta, stride: Sequence[int], dilation: Sequence[int], groups: int
) -> bool:
    """Whether torch has oneDNN compute a convolution, transposed or not.

    It runs tiny ones by itself, 1 x 1 ones of few samples on one thread, fp64 always, and 16 bits with AVX2
    (`mkldnn_bf16_device_check`; a few CPUs of AVX2 that convert to 16 bits are taken as the others). A
    sequence is taken as an image of one row; only the last two axes of a kernel count.

    >>> image = TensorMeta((1, 8, 10, 10), (800, 100, 10, 1), 0, "float32")
    >>> kernel = TensorMeta((8, 5, 3, 3), (45, 9, 3, 1), 0, "float32")
    >>> asks_onednn(image, kernel, (2, 2), (1, 1), 1)
    False
    """
    if x.dtype not in ("float32", "bfloat16", "float16"):
        return False
    if x.itemsize < DTYPE_BYTES["float32"]:
        return vector_bytes() > AVX2_BYTES
    kernel = (1, *weight.shape[2:])[-2:]
    spread = max(stride) > 1 or max(dilation) > 1 or x.shape[0] >= _BATCH_WORTH_ONE_THREAD
    worth_it = spread or prod(kernel) > 1 or thread_count() > 1
    big = x.shape[0] > 1 or prod(x.shape[:4]) > _TINY_INPUT_ELEMENTS
    return worth_it and (groups > 1 or min(kernel) > _SMALL_KERNEL or big)


def strided_scratch_bytes(
    read: TensorMeta, made: TensorMeta, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    *, nested: bool,
) -> int:  # fmt: skip
    """Scratch of `brgconv_strided`: the input's gradient of a strided convolution, or a transposed one.

    Each thread has room for the addresses of one batch of products, for one sample of what is read with
    the rows that the kernel reaches beyond it, a page of marks, and, where the stride does not divide the
    width of what is made, for a row of that. Each piece begins on a page of its own.

    Args:
        read: the gradient of a convolution's output; what a transposed convolution is given.
        made: the gradient of its input; what a transposed convolution returns.
        kernel, stride, padding: one number an axis.
        nested: whether another primitive (a transposed convolution) holds it.
    """
    threads = thread_count()
    taps = rounded(prod(kernel) * BATCH_ELEMENT_BYTES, PAGE_BYTES)
    pieces = [threads * rounded(taps, BATCH_ELEMENT_BYTES)]
    axes = zip(read.shape[2:], made.shape[2:], kernel, stride, padding)
    reached = prod(size + _beyond(size, *rest) for size, *rest in axes)
    pieces.append(threads * rounded(reached * read.shape[1], PAGE_BYTES) * read.itemsize)
    pieces.append(threads * PAGE_BYTES)
    if made.shape[-1] % stride[-1]:
        row = rounded(made.shape[-1], stride[-1]) * made.shape[1]
        pieces.append(threads * rounded(row, PAGE_BYTES) * made.itemsize)
    return sum(pieces) + len(pieces) * PAGE_BYTES + (NESTED_BYTES if nested else 0)


def _beyond(size: int, made: int, kernel: int, stride: int, before: int) -> int:
    """Rows that a kernel reaches beyond both ends of what it reads (`t_ovf`, `b_ovf`)."""
    after = (size - 1) * stride + kernel - (made + before)
    return sum(max(0, kernel - 1 - padding) // stride for padding in (before, after))
