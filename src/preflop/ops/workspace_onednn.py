"""What convolutions that ask oneDNN allocate inside: reordered operands and results, and scratchpads.

oneDNN chooses memory layouts by the machine's instruction set: blocks of 16 channels with AVX-512, of 8 with
AVX2. Left out, because they are small or a matter of the code oneDNN generates: padded biases, barriers, the
gemm buffers of 16-bit matmuls, and the patches of a forward convolution that AVX2 has no kernel for (more than
3 columns of padding before it), of which a gemm unfolds as many as fit its caches. Where oneDNN is not asked,
`native_convolution` has the rule.

Source of the layouts: oneDNN, src/cpu/x64/jit_avx512_common_conv_kernel.cpp and jit_avx2_conv_kernel_f32.cpp
(`init_conf`); of the order of the allocations: aten/src/ATen/native/mkldnn/Conv.cpp and
ideep/operators/conv.hpp.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from preflop.ops.arguments import argument, need
from preflop.ops.native_convolution import NativeConvolution
from preflop.ops.onednn import (
    NESTED_BYTES,
    PAGE_BYTES,
    asks_onednn,
    channel_block,
    rounded,
    strided_scratch_bytes,
)
from preflop.ops.registry import workspace
from preflop.ops.workspace import contiguous_copy_bytes, is_contiguous, thread_count, vector_bytes
from preflop.tape.events import Signature, TensorMeta
from preflop.units import AVX2_BYTES, DTYPE_BYTES

_NARROW_BLOCK = 8
"""Of an AVX2 register: the weight's gradient where few channels are read, but more than a first image has."""
_STRIDED_BLOCKS = {64: (32,), AVX2_BYTES: (32, 24)}
"""Width of a vector register -> channels of the weight's block in a strided kernel, beyond 16: the most
efficient of 16 to 64 for nearly all shapes (`est_eff` in jit_brgemm_conv_bwd_utils.cpp). With AVX2 it is 24 for
a part of them, mostly where that pads less."""
_STRIDED_FEW = 16
_FIRST_IMAGE_CHANNELS = 3
_FORWARD_REST_BYTES = 4_120
"""Channels-last forward: a page a thread, and this (the same for the twelve shapes measured)."""
_WIDEST_KERNEL = 14
_WIDEST_DEPTHWISE_KERNEL = 3
_MOST_SCRATCH_BYTES, _SCRATCH_PER_TENSOR_BYTE, _PART_OF_ROOM = 1 << 30, 15, 0.05
"""Limits of a gemm's scratch (`scratchpad_limit`), and which part of the room under them its patches take where
they do not fit (gemm_convolution_utils.cpp)."""
_SHARED_INSIDE_POSITIONS = 512
"""Output positions a thread, from which on `gemm_convolution_utils.cpp` threads inside the gemm."""


@dataclass(frozen=True, slots=True)
class _Convolution:
    """One convolution's sizes, as both directions need them. Bytes with channels padded to blocks."""

    x: TensorMeta
    weight: TensorMeta
    y: TensorMeta
    groups: int
    stride: tuple[int, ...]
    transposed: bool
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        return self.x.itemsize

    @property
    def tensors_bytes(self) -> int:
        """Input, weight and result."""
        return self.x.bytes + self.weight.bytes + self.y.bytes

    @property
    def by_onednn(self) -> bool:
        return asks_onednn(self.x, self.weight, self.stride, self.dilation, self.groups)

    @property
    def native(self) -> NativeConvolution:
        """The same by torch's own kernels."""
        return NativeConvolution(
            self.x, self.weight, self.y, self.groups, self.stride, self.padding, self.dilation, self.transposed
        )

    @property
    def channels_last(self) -> bool:
        """oneDNN computes in the caller's own channels-last layout and reorders only the weight."""
        shape, stride = self.x.shape, self.x.stride
        return len(shape) == 4 and not is_contiguous(self.x) and stride[1] == 1

    @property
    def source(self) -> TensorMeta:
        """What the convolution reads. A transposed one is the gradient of one from its result to its input."""
        return self.y if self.transposed else self.x

    @property
    def made(self) -> TensorMeta:
        """What the convolution makes: a transposed one's input."""
        return self.x if self.transposed else self.y

    @property
    def plain_input(self) -> bool:
        """An image of fewer channels than a block is read as it lies (`is_1stconv`); in 16 bits of 1 or 3."""
        channels = self.source.shape[1]
        few = channels < channel_block() if self.itemsize == DTYPE_BYTES["float32"] else channels in (1, 3)
        return self.groups == 1 and few and not self.pointwise

    @property
    def pointwise(self) -> bool:
        """1 x 1 kernels, for which oneDNN has implementations of their own (none for a strided transposed one)."""
        return prod(self.weight.shape[2:]) == 1 and not (self.transposed and max(self.stride) > 1)

    @property
    def narrow_gradient(self) -> bool:
        """Whether an AVX2 kernel makes the weight's gradient, from channels padded to its blocks: AVX-512's read
        images of up to 3 channels or whole blocks (`src_ok` in `init_conf`), AVX2's of 3 (`flat` in
        jit_avx2_conv_kernel_f32.cpp)."""
        channels = self.source.shape[1]
        padded = channels > _FIRST_IMAGE_CHANNELS or (channels < _FIRST_IMAGE_CHANNELS and vector_bytes() == AVX2_BYTES)
        return self.plain_input and padded

    @property
    def strided(self) -> bool:
        """Whether the gradient of the input (a transposed one's result) is made by a kernel for strides.

        It takes no dilation, and of groups only those wider than a block; of a transposed convolution AVX2's
        blocks too, where strides divide the result.
        """
        if max(self.stride) == 1 or max(self.dilation) > 1:
            return False
        even = not any(size % step for size, step in zip(self.source.shape[2:], self.stride))
        block = _NARROW_BLOCK if self.transposed and even else channel_block()
        return self.groups == 1 or self.weight.shape[0] // self.groups > block

    def channels(self, count: int) -> int:
        """Channels in memory: padded to whole blocks, without groups or one channel to a group."""
        depthwise = self.groups == self.x.shape[1]
        return rounded(count, channel_block()) if self.groups == 1 or depthwise else count

    def blocked_bytes(self, meta: TensorMeta) -> int:
        """Bytes of an activation in oneDNN's layout."""
        count, channels, *space = meta.shape
        return count * self.channels(channels) * prod(space) * self.itemsize

    @property
    def source_bytes(self) -> int:
        """What is read, in oneDNN's layout: nothing where it is read as it lies."""
        return 0 if self.plain_input else self.blocked_bytes(self.source)

    @property
    def weight_bytes(self) -> int:
        """The weight in oneDNN's layout."""
        out, inner, *kernel = self.weight.shape
        if self.groups == self.x.shape[1] and self.groups > 1:
            return rounded(out, channel_block()) * inner * prod(kernel) * self.itemsize
        inner = inner if self.plain_input else self.channels(inner)
        return self.channels(out) * inner * prod(kernel) * self.itemsize

    @property
    def padded_weight_bytes(self) -> int:
        """The weight where the gradient of an image is made: its channels are whole blocks there."""
        out, inner, *kernel = self.weight.shape
        if self.groups > 1 and not self.strided:
            return self.weight_bytes
        padded = rounded(inner, channel_block())
        if self.strided and inner > _STRIDED_FEW:
            padded = min(rounded(inner, block) for block in _STRIDED_BLOCKS[vector_bytes()])
        outer = out if self.strided else rounded(out, channel_block())
        return outer * padded * prod(kernel) * self.itemsize

    @property
    def weight_gradient_by_gemm(self) -> bool:
        """Whether no kernel of oneDNN's own fits and a plain gemm takes the operands as they are.

        Wider than 14, depthwise ones wider than 3 or than the image, and groups that do not fill 8 channels.
        Source: oneDNN, src/cpu/x64/jit_avx512_common_conv_kernel.cpp (`kw > 14`), jit_uni_dw_convolution.cpp.
        """
        if self.itemsize < DTYPE_BYTES["float32"]:
            return False
        width = self.weight.shape[-1]
        if self.groups == 1 and vector_bytes() == AVX2_BYTES:
            return not self.pointwise and not self.avx2_takes_the_weight
        if self.groups == 1:
            return width > _WIDEST_KERNEL or self.reaches_over_the_image
        if self.groups == self.x.shape[1]:
            pairs = zip(self.source.shape[2:], self.weight.shape[2:])
            return width > _WIDEST_DEPTHWISE_KERNEL or any(image < kernel for image, kernel in pairs)
        return self._groups_do_not_fill(_NARROW_BLOCK)

    def _groups_do_not_fill(self, block: int) -> bool:
        return any(count // self.groups % block for count in (self.x.shape[1], self.y.shape[1]))

    @property
    def avx2_takes_the_weight(self) -> bool:
        """Narrow kernels that are not dilated, not taller than the image and reach into it (`params_ok` in
        jit_avx2_conv_kernel_f32.cpp)."""
        tall = zip(self.source.shape[2:-1], self.weight.shape[2:-1])
        reaches = all(pad < kernel for pad, kernel in zip(self.padding[:-1], self.weight.shape[2:-1]))
        narrow = self.weight.shape[-1] < _WIDEST_KERNEL and max(self.dilation) == 1
        return narrow and reaches and all(kernel <= image for image, kernel in tall)

    @property
    def groups_by_gemm(self) -> bool:
        """Whether AVX2 has no kernel for these groups, neither forward nor back: a gemm reads them as they lie."""
        some = 1 < self.groups < self.x.shape[1] and vector_bytes() == AVX2_BYTES
        return some and self._groups_do_not_fill(_NARROW_BLOCK)

    @property
    def reaches_over_the_image(self) -> bool:
        """Whether a dilated kernel spans more than the image."""
        sizes = zip(self.source.shape[2:], self.weight.shape[2:], self.dilation)
        return any(step > 1 and step * (kernel - 1) + 1 > image for image, kernel, step in sizes)

    @property
    def forward_by_gemm(self) -> bool:
        """Whether the padding is wider than the image; then forward is a plain gemm too."""
        narrow = self.itemsize < DTYPE_BYTES["float32"] or self.transposed or self.groups > 1
        return not narrow and any(pad > image for pad, image in zip(self.padding, self.x.shape[2:]))


def _to_dense(result: int, *, channels_last: bool) -> int:
    """Bytes while a result leaves oneDNN: it and its dense copy; through channels-last, one more.

    Source: aten/src/ATen/native/mkldnn/MKLDNNConversions.cpp, `mkldnn_to_dense`.
    """
    return 3 * result if channels_last else 2 * result


@workspace("aten.convolution")
def convolution(sig: Signature) -> int:
    """Input, weight and output in oneDNN's layout; the first two are gone when the output is copied out."""
    x, weight, y = need(sig, 0, "input"), need(sig, 1, "weight"), sig.outputs[0]
    case = _Convolution(
        x,
        weight,
        y,
        groups=argument(sig, 8, "groups"),
        stride=argument(sig, 3, "stride"),
        transposed=bool(argument(sig, 6, "transposed")),
        padding=argument(sig, 4, "padding"),
        dilation=argument(sig, 5, "dilation"),
    )
    if not case.by_onednn:
        return case.native.forward_bytes()
    if case.channels_last:
        return _channels_last_forward(case)
    if case.forward_by_gemm:
        patches = prod(weight.shape[1:]) * prod(y.shape[2:][-2:]) * case.itemsize
        return min(thread_count(), x.shape[0]) * patches + contiguous_copy_bytes(x)
    peaks = _image_peaks(case) if case.transposed else _made_peaks(case)
    return max(peaks) - y.bytes + contiguous_copy_bytes(x)


def _made_peaks(case: _Convolution) -> tuple[int, int]:
    """Bytes while a convolution runs (a transposed one's gradient of its input), and as its result leaves."""
    blocked = case.blocked_bytes(case.made)
    if case.groups_by_gemm:
        return blocked, blocked + case.made.bytes
    running = case.source_bytes + case.weight_bytes + blocked + _subsample_bytes(case)
    narrow = case.itemsize < DTYPE_BYTES["float32"]  # runs channels last
    return running, _to_dense(case.made.bytes, channels_last=True) if narrow else blocked + case.made.bytes


def _image_peaks(case: _Convolution) -> tuple[int, int]:
    """Bytes while the gradient of a convolution's input is made (a transposed one's result), and as it leaves."""
    image, read = case.source, case.made
    if case.strided and case.itemsize == DTYPE_BYTES["float32"]:
        running = _channels_last_copy(read) + case.padded_weight_bytes + image.bytes + _strided_bytes(case)
        return running, _to_dense(image.bytes, channels_last=_channels_last_copy(image) > 0)
    blocked = case.blocked_bytes(image)
    if case.groups_by_gemm:
        return blocked + _patches_bytes(case), blocked + image.bytes
    running = case.blocked_bytes(read) + case.padded_weight_bytes + blocked
    narrow = case.itemsize < DTYPE_BYTES["float32"]
    return running, _to_dense(image.bytes, channels_last=True) if narrow else blocked + image.bytes


def _channels_last_copy(meta: TensorMeta) -> int:
    """Bytes of an activation brought to channels last: none of one channel, which lies so already."""
    return meta.bytes if meta.shape[1] > 1 else 0


def _strided_bytes(case: _Convolution) -> int:
    kernel = case.weight.shape[2:]
    return strided_scratch_bytes(
        case.made, case.source, kernel, case.stride, case.padding, nested=case.transposed
    )


def _channels_last_forward(case: _Convolution) -> int:
    by_torch = _channels_last_weight_bytes(case)
    if case.transposed and case.strided and case.itemsize == DTYPE_BYTES["float32"]:
        return case.padded_weight_bytes + by_torch + _strided_bytes(case)
    scratch = thread_count() * PAGE_BYTES + _FORWARD_REST_BYTES if case.groups == 1 else 0
    return _grouped_weight_bytes(case) + by_torch + scratch


def _subsample_bytes(case: _Convolution) -> int:
    """A strided 1 x 1 kernel reads only some pixels: each thread gathers one sample's first.

    Source: oneDNN, src/cpu/x64/jit_uni_1x1_conv_utils.hpp, `rtus` (reduce to unit stride).
    """
    strided = max(case.stride) > 1 and prod(case.weight.shape[2:]) == 1 and case.groups == 1
    if not strided or case.transposed or case.itemsize < DTYPE_BYTES["float32"]:
        return 0
    return thread_count() * case.channels(case.x.shape[1]) * prod(case.y.shape[2:]) * case.itemsize + NESTED_BYTES


@workspace("aten.convolution_backward")
def convolution_backward(sig: Signature) -> int:
    """First the input's gradient, which stays, then the weight's: each with its operands reordered.

    Where several threads share the weight gradient over samples, each but the first sums into a copy.
    """
    gradient, x, weight = need(sig, 0, "grad_output"), need(sig, 1, "input"), need(sig, 2, "weight")
    case = _Convolution(
        x,
        weight,
        gradient,
        groups=argument(sig, 9, "groups"),
        stride=argument(sig, 4, "stride"),
        transposed=bool(argument(sig, 7, "transposed")),
        padding=argument(sig, 5, "padding"),
        dilation=argument(sig, 6, "dilation"),
    )
    wants_input, wants_weight, wants_bias = argument(sig, 10, "output_mask")
    outputs = sum(meta.bytes for meta in sig.outputs)
    if not case.by_onednn:
        return case.native.backward_bytes(
            wants_input=wants_input, wants_weight=wants_weight, made_bytes=outputs
        )
    bias_gradient = gradient.shape[1] * gradient.itemsize if wants_bias else 0
    input_gradient = x.bytes if wants_input else 0
    if case.channels_last:
        peaks = _channels_last_backward(case, input_gradient, bias_gradient, wants_weight=wants_weight)
    else:
        peaks = _blocked_backward(case, input_gradient, bias_gradient, wants_weight=wants_weight)
    return max(max(peaks, default=0) - outputs, 0)


def _blocked_backward(
    case: _Convolution, input_gradient: int, bias_gradient: int, *, wants_weight: bool
) -> list[int]:
    """Bytes alive at the moments that can be the peak, outputs included.

    A gradient that is not contiguous is copied first, and the copy stays.
    """
    copy = contiguous_copy_bytes(case.y) + contiguous_copy_bytes(case.x)
    input_gradient += copy
    peaks: list[int] = []
    if input_gradient > copy:
        made = _made_peaks(case) if case.transposed else _image_peaks(case)
        peaks.extend(copy + alive for alive in made)
    input_gradient += bias_gradient  # it is made with the weight's
    if wants_weight and case.weight_gradient_by_gemm:
        peaks.append(input_gradient + case.weight.bytes + _gemm_bytes(case))
    elif wants_weight:
        operands, weight = _weight_gradient_bytes(case)
        sums = _reduction_bytes(case) + _accumulator_bytes(case)
        peaks.append(input_gradient + operands + weight + sums)
        peaks.append(input_gradient + weight + case.weight.bytes)
    return peaks


def _weight_gradient_bytes(case: _Convolution) -> tuple[int, int]:
    """Both activations, and the weight's gradient, as the kernel that makes it has them."""
    if not case.narrow_gradient:
        return case.source_bytes + case.blocked_bytes(case.made), case.weight_bytes
    operands = sum(
        meta.bytes // meta.shape[1] * rounded(meta.shape[1], _NARROW_BLOCK)
        for meta in (case.source, case.made)
    )
    out, inner, *kernel = case.weight.shape
    channels = rounded(out, _NARROW_BLOCK) * rounded(inner, _NARROW_BLOCK)
    return operands, channels * prod(kernel) * case.itemsize


def _gemm_bytes(case: _Convolution) -> int:
    """Scratch of a weight gradient by gemm: for each thread one sample's patches and a sum of weights.

    The sum takes four times the weight: oneDNN books floats, and their number is the weight's bytes. Large
    images are shared out inside the gemm, small ones by sample and group. Where that is much beside the tensors
    themselves, only a part of the positions is unfolded at once. Source: oneDNN,
    src/cpu/gemm_convolution_utils.cpp, `init_conf`; fits 40 shapes measured with one and two threads to the byte.
    """
    positions = prod(case.made.shape[2:][-2:])
    patches = _patches_bytes(case)
    apart = positions // thread_count() < _SHARED_INSIDE_POSITIONS
    threads = min(thread_count(), case.x.shape[0] * case.groups) if apart else 1
    sums = threads * case.weight.bytes * DTYPE_BYTES["float32"] + NESTED_BYTES
    room = min(_MOST_SCRATCH_BYTES, _SCRATCH_PER_TENSOR_BYTE * thread_count() * case.tensors_bytes) - sums
    if room < threads * patches:
        column = threads * patches // positions
        patches = max(channel_block(), int(room // column * _PART_OF_ROOM)) * patches // positions
    nested = NESTED_BYTES if case.transposed else 0
    return threads * patches + sums + NESTED_BYTES + nested


def _patches_bytes(case: _Convolution) -> int:
    """One sample's, of one group; of one frame of a volume: depth is walked through."""
    return prod(case.weight.shape[1:]) * prod(case.made.shape[2:][-2:]) * case.itemsize


def _channels_last_backward(
    case: _Convolution, input_gradient: int, bias_gradient: int, *, wants_weight: bool
) -> list[int]:
    """Only weights are reordered: to channels-last by torch, then to oneDNN's layout. The weight's gradient
    comes in that layout, and then dense twice."""
    by_torch = _channels_last_weight_bytes(case)
    scratch = 0
    if case.strided and not case.transposed and case.itemsize == DTYPE_BYTES["float32"]:
        scratch = _strided_bytes(case)
    peaks = [case.weight_bytes + by_torch + input_gradient + scratch] if input_gradient else []
    if not wants_weight:
        return peaks
    before = input_gradient + 2 * bias_gradient + case.weight.bytes
    by_gemm = case.weight_gradient_by_gemm
    if by_gemm and vector_bytes() == AVX2_BYTES and not case.avx2_takes_the_weight:
        image = prod(case.x.shape[1:]) // case.groups * case.itemsize  # transposed for the gemm
        peaks.append(before - bias_gradient + by_torch + _gemm_bytes(case) + image + NESTED_BYTES)
    elif by_gemm and case.groups == 1:
        image = prod(case.x.shape[1:]) * case.itemsize
        threads = min(thread_count(), case.x.shape[0])
        peaks.append(before + by_torch + _gemm_bytes(case) + threads * image)
    else:
        inside = _grouped_weight_bytes(case, wide=by_gemm) + _reduction_bytes(case)
        peaks.append(before + by_torch + inside + case.weight.bytes)
    return peaks


def _channels_last_weight_bytes(case: _Convolution) -> int:
    """torch's own channels-last copy of the weight; kernels of 1 x 1 or of one channel lie so already, and
    so do those of a model that was brought to channels last itself."""
    if case.weight.stride[1] == 1:
        return 0
    return case.weight.bytes if prod(case.weight.shape[2:]) > 1 and case.weight.shape[1] > 1 else 0


def _grouped_weight_bytes(case: _Convolution, *, wide: bool = False) -> int:
    """The weight in oneDNN's layout beside channels-last activations: each group padded to whole blocks.

    Depthwise weights are not, except in the gradient of wide ones.
    """
    if case.groups == 1 or (case.groups == case.x.shape[1] and not wide):
        return case.weight_bytes
    out, inner, *kernel = case.weight.shape
    mine = rounded(out // case.groups, channel_block()) * rounded(inner, channel_block())
    return case.groups * mine * prod(kernel) * case.itemsize


def _reduction_bytes(case: _Convolution) -> int:
    """Copies of the weight gradient that threads sum into: one less than threads over rows of samples.

    How threads are laid out minimises memory moved; a weight counts five times: written to the copy,
    read from it and written to the sum, where a write is as dear as two reads.
    Source: oneDNN, src/cpu/x64/jit_avx512_common_conv_kernel.cpp, `balance`.
    """
    count = thread_count()
    if case.groups > 1 or case.narrow_gradient:
        return 0
    if vector_bytes() == AVX2_BYTES:
        return _shared_blocks_bytes(case)
    x, y = case.source, case.made
    inner_block = x.shape[1] if case.plain_input else channel_block()
    inner_blocks = -(-x.shape[1] // inner_block)
    outer_blocks = -(-y.shape[1] // channel_block())
    rows = x.shape[0] * y.shape[2]
    x_row = prod(x.shape[2:]) // prod(case.stride) // y.shape[2]
    y_row, kernel = prod(y.shape[3:]), prod(case.weight.shape[2:])

    def cost(over_rows: int, over_outer: int, over_inner: int) -> int:
        mine = -(-rows // over_rows)
        inner = -(-inner_blocks // over_inner) * inner_block
        outer = -(-outer_blocks // over_outer) * channel_block()
        return mine * (inner * x_row + outer * y_row) + 5 * outer * inner * kernel

    best, chosen = cost(1, 1, 1), 1
    for over_rows in range(1, min(count, rows) + 1):
        left = count // over_rows
        for over_outer in range(1, min(left, outer_blocks) + 1):
            over_inner = min(left // over_outer, inner_blocks)
            now = cost(over_rows, over_outer, over_inner)
            if now <= best:
                best, chosen = now, over_rows
    return (chosen - 1) * case.weight_bytes


def _shared_blocks_bytes(case: _Convolution) -> int:
    """With AVX2 each thread has blocks of the weight's gradient for itself; only where there are fewer blocks than
    threads they share them over samples. Not counted: where 1 x 1 kernels share larger pieces.

    Source: oneDNN, src/cpu/x64/cpu_reducer.cpp, `reduce_balancer_t::balance`.
    """
    count = thread_count()
    blocks = -(-case.source.shape[1] // channel_block()) * -(-case.made.shape[1] // channel_block())
    if blocks >= count or case.pointwise:
        return 0
    sharing = min(count // blocks, case.x.shape[0])
    return (sharing - 1) * case.weight_bytes


def _accumulator_bytes(case: _Convolution) -> int:
    """16-bit weight gradients are summed in fp32 first. Not counted: transposed operands per thread."""
    narrow = case.itemsize < DTYPE_BYTES["float32"]
    return case.weight_bytes // case.itemsize * DTYPE_BYTES["float32"] if narrow else 0
