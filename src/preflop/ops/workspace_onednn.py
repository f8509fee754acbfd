"""What CPU kernels that ask oneDNN allocate inside: reordered operands and results, and scratchpads.

oneDNN chooses memory layouts by the machine's instruction set. These rules are those of AVX-512 (blocks
of 16 channels); with AVX2 (blocks of 8) they differ only where channels are padded. Left out, because
they are small or a matter of the code oneDNN generates: padded biases, barriers, the gemm buffers of
16-bit matmuls.

Source of the layouts: oneDNN, src/cpu/x64/jit_avx512_common_conv_kernel.cpp (`init_conf`); of the order
of the allocations: aten/src/ATen/native/mkldnn/Conv.cpp and ideep/operators/conv.hpp.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from preflop.ops.arguments import argument, need
from preflop.ops.registry import workspace
from preflop.ops.workspace import contiguous_copy_bytes, is_contiguous, thread_count
from preflop.tape.events import Signature, TensorMeta
from preflop.units import DTYPE_BYTES

_BLOCK = 16
"""Channels of one block: fp32 numbers of one AVX-512 register."""
_PAGE_BYTES = 4096
_FORWARD_REST_BYTES = 4_120
"""Channels-last forward: a page a thread, and this (the same for the twelve shapes measured)."""
_WIDEST_KERNEL = 14
_WIDEST_DEPTHWISE_KERNEL = 3
_SHARED_INSIDE_POSITIONS = 512
"""Output positions a thread, from which on `gemm_convolution_utils.cpp` threads inside the gemm."""


def _rounded(size: int, step: int) -> int:
    return -(-size // step) * step


@dataclass(frozen=True, slots=True)
class _Convolution:
    """One convolution's sizes, as both directions need them. Bytes with channels padded to blocks."""

    x: TensorMeta
    weight: TensorMeta
    y: TensorMeta
    groups: int
    stride: tuple[int, ...]
    transposed: bool
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    """Only scratch depends on these two; copies do not."""

    @property
    def itemsize(self) -> int:
        return self.x.itemsize

    @property
    def channels_last(self) -> bool:
        """oneDNN computes in the caller's own channels-last layout and reorders only the weight."""
        shape, stride = self.x.shape, self.x.stride
        return len(shape) == 4 and not is_contiguous(self.x) and stride[1] == 1

    @property
    def plain_input(self) -> bool:
        """An image of 1 or 3 channels is read as it is."""
        return self.groups == 1 and self.x.shape[1] in (1, 3) and not self.transposed

    def channels(self, count: int) -> int:
        """Channels in memory: padded to whole blocks, without groups or one channel to a group."""
        depthwise = self.groups == self.x.shape[1]
        return _rounded(count, _BLOCK) if self.groups == 1 or depthwise else count

    def blocked_bytes(self, meta: TensorMeta) -> int:
        """Bytes of an activation in oneDNN's layout."""
        count, channels, *space = meta.shape
        return count * self.channels(channels) * prod(space) * self.itemsize

    @property
    def x_bytes(self) -> int:
        return 0 if self.plain_input else self.blocked_bytes(self.x)

    @property
    def weight_bytes(self) -> int:
        """The weight in oneDNN's layout."""
        out, inner, *kernel = self.weight.shape
        if self.groups == self.x.shape[1] and self.groups > 1:
            return _rounded(out, _BLOCK) * inner * prod(kernel) * self.itemsize
        inner = inner if self.plain_input else self.channels(inner)
        return self.channels(out) * inner * prod(kernel) * self.itemsize

    @property
    def weight_gradient_by_gemm(self) -> bool:
        """Whether no kernel of oneDNN's own fits and a plain gemm takes the operands as they are.

        Wider than 14, depthwise ones wider than 3 or than the image, and groups that do not fill half a block.
        Source: oneDNN, src/cpu/x64/jit_avx512_common_conv_kernel.cpp (`kw > 14`), jit_uni_dw_convolution.cpp.
        """
        if self.itemsize < DTYPE_BYTES["float32"] or self.transposed:
            return False
        width = self.weight.shape[-1]
        if self.groups == 1:
            return width > _WIDEST_KERNEL or self.reaches_over_the_image
        if self.groups == self.x.shape[1]:
            pairs = zip(self.x.shape[2:], self.weight.shape[2:])
            return width > _WIDEST_DEPTHWISE_KERNEL or any(image < kernel for image, kernel in pairs)
        half = _BLOCK // 2
        return any(count // self.groups % half for count in (self.x.shape[1], self.y.shape[1]))

    @property
    def reaches_over_the_image(self) -> bool:
        """Whether a dilated kernel spans more than the image."""
        sizes = zip(self.x.shape[2:], self.weight.shape[2:], self.dilation)
        return any(step > 1 and step * (kernel - 1) + 1 > image for image, kernel, step in sizes)

    @property
    def forward_by_gemm(self) -> bool:
        """Whether the padding is wider than the image; then forward is a plain gemm too."""
        narrow = self.itemsize < DTYPE_BYTES["float32"] or self.transposed or self.groups > 1
        return not narrow and any(pad > image for pad, image in zip(self.padding, self.x.shape[2:]))

    @property
    def computes_channels_last(self) -> bool:
        """16-bit and transposed kernels run on channels-last memory, whatever the caller has."""
        return self.transposed or self.itemsize < DTYPE_BYTES["float32"]

    @property
    def gradient_computes_channels_last(self) -> bool:
        """So does the gradient of the input of a strided convolution, and of an image."""
        strided = max(self.stride) > 1 and self.groups == 1
        forward_16_bit = self.itemsize < DTYPE_BYTES["float32"]
        return not self.transposed and (strided or self.plain_input or forward_16_bit)


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
    if not _asks_onednn(case):
        return 0
    if case.channels_last:
        scratch = thread_count() * _PAGE_BYTES + _FORWARD_REST_BYTES if case.groups == 1 else 0
        return _grouped_weight_bytes(case) + _channels_last_weight_bytes(case) + scratch
    if case.forward_by_gemm:
        patches = prod(weight.shape[1:]) * prod(y.shape[2:][-2:]) * case.itemsize
        return min(thread_count(), x.shape[0]) * patches + contiguous_copy_bytes(x)
    blocked = case.blocked_bytes(y)
    running = case.x_bytes + case.weight_bytes + blocked + _subsample_bytes(case)
    leaving = _to_dense(y.bytes, channels_last=True) if case.computes_channels_last else blocked + y.bytes
    return max(running, leaving) - y.bytes + contiguous_copy_bytes(x)


def _subsample_bytes(case: _Convolution) -> int:
    """A strided 1 x 1 kernel reads only some pixels: each thread gathers one sample's first.

    Source: oneDNN, src/cpu/x64/jit_uni_1x1_conv_utils.hpp, `rtus` (reduce to unit stride).
    """
    strided = max(case.stride) > 1 and prod(case.weight.shape[2:]) == 1 and case.groups == 1
    if not strided or case.transposed or case.itemsize < DTYPE_BYTES["float32"]:
        return 0
    return thread_count() * case.channels(case.x.shape[1]) * prod(case.y.shape[2:]) * case.itemsize


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
    if not _asks_onednn(case):
        return 0
    wants_input, wants_weight, wants_bias = argument(sig, 10, "output_mask")
    outputs = sum(meta.bytes for meta in sig.outputs)
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
    gradient = case.blocked_bytes(case.y)
    peaks = []
    if input_gradient > copy:
        result = case.blocked_bytes(case.x)
        peaks.append(copy + gradient + case.weight_bytes + result)
        through = case.gradient_computes_channels_last
        leaving = _to_dense(case.x.bytes, channels_last=True) if through else result + case.x.bytes
        peaks.append(copy + leaving)
    input_gradient += bias_gradient  # it is made with the weight's
    if wants_weight and case.weight_gradient_by_gemm:
        peaks.append(input_gradient + case.weight.bytes + _gemm_bytes(case))
    elif wants_weight:
        operands = gradient + case.x_bytes
        sums = _reduction_bytes(case) + _accumulator_bytes(case)
        peaks.append(input_gradient + operands + case.weight_bytes + sums)
        peaks.append(input_gradient + case.weight_bytes + case.weight.bytes)
    return peaks


def _gemm_bytes(case: _Convolution) -> int:
    """Scratch of a weight gradient by gemm: for each thread one sample's patches and a sum of weights.

    The sum takes four times the weight: oneDNN books floats, and their number is the weight's bytes. Large
    images are shared out inside the gemm, small ones by sample and group; 256 bytes are the gradient of the
    bias in passing. Source: oneDNN, src/cpu/gemm_convolution_utils.cpp, `init_conf`; fits 40 shapes measured
    with one and two threads to the byte.
    """
    positions = prod(case.y.shape[2:][-2:])  # of one frame: depth is walked through
    patches = prod(case.weight.shape[1:]) * positions * case.itemsize
    apart = positions // thread_count() < _SHARED_INSIDE_POSITIONS
    threads = min(thread_count(), case.x.shape[0] * case.groups) if apart else 1
    return threads * (patches + case.weight.bytes * DTYPE_BYTES["float32"]) + 256


def _channels_last_backward(
    case: _Convolution, input_gradient: int, bias_gradient: int, *, wants_weight: bool
) -> list[int]:
    """Only weights are reordered: to channels-last by torch, then to oneDNN's layout. The weight's gradient
    comes in that layout, and then dense twice."""
    by_torch = _channels_last_weight_bytes(case)
    peaks = [case.weight_bytes + by_torch + input_gradient] if input_gradient else []
    if not wants_weight:
        return peaks
    before = input_gradient + 2 * bias_gradient + case.weight.bytes
    if case.weight_gradient_by_gemm and case.groups == 1:
        image = prod(case.x.shape[1:]) * case.itemsize
        threads = min(thread_count(), case.x.shape[0])
        peaks.append(before + by_torch + _gemm_bytes(case) + threads * image)
    else:
        wide = case.weight_gradient_by_gemm
        inside = _grouped_weight_bytes(case, wide=wide) + _reduction_bytes(case)
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
    mine = _rounded(out // case.groups, _BLOCK) * _rounded(inner, _BLOCK)
    return case.groups * mine * prod(kernel) * case.itemsize


def _asks_onednn(case: _Convolution) -> bool:
    """torch runs tiny convolutions by itself, 1 x 1 ones of few samples on one thread, and fp64 always.

    Source: aten/src/ATen/native/Convolution.cpp, `ConvParams::use_mkldnn`.
    """
    if case.x.dtype not in ("float32", "bfloat16", "float16"):
        return False
    if case.itemsize < DTYPE_BYTES["float32"] or case.transposed:
        return True
    batch, kernel = case.x.shape[0], case.weight.shape[2:]
    worth_it = (
        max(case.stride) > 1
        or batch >= _BATCH_WORTH_ONE_THREAD
        or prod(kernel) > 1
        or thread_count() > 1
    )
    big = batch > 1 or case.x.elements > _TINY_INPUT_ELEMENTS
    return worth_it and (case.groups > 1 or min(kernel) > _SMALL_KERNEL or big)


_BATCH_WORTH_ONE_THREAD = 16
_TINY_INPUT_ELEMENTS = 20_480
_SMALL_KERNEL = 3
"""The limits of `use_mkldnn`."""


def _reduction_bytes(case: _Convolution) -> int:
    """Copies of the weight gradient that threads sum into: one less than threads over rows of samples.

    How threads are laid out minimises memory moved; a weight counts five times: written to the copy,
    read from it and written to the sum, where a write is as dear as two reads.
    Source: oneDNN, src/cpu/x64/jit_avx512_common_conv_kernel.cpp, `balance`.
    """
    count = thread_count()
    if case.groups > 1 or case.transposed:
        return 0
    inner_block = case.x.shape[1] if case.plain_input else _BLOCK
    inner_blocks = -(-case.x.shape[1] // inner_block)
    outer_blocks = -(-case.y.shape[1] // _BLOCK)
    rows = case.x.shape[0] * case.y.shape[2]
    x_row = prod(case.x.shape[2:]) // prod(case.stride) // case.y.shape[2]
    y_row, kernel = prod(case.y.shape[3:]), prod(case.weight.shape[2:])

    def cost(over_rows: int, over_outer: int, over_inner: int) -> int:
        mine = -(-rows // over_rows)
        inner = -(-inner_blocks // over_inner) * inner_block
        outer = -(-outer_blocks // over_outer) * _BLOCK
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


def _accumulator_bytes(case: _Convolution) -> int:
    """16-bit weight gradients are summed in fp32 first. Not counted: transposed operands per thread."""
    narrow = case.itemsize < DTYPE_BYTES["float32"]
    return case.weight_bytes // case.itemsize * DTYPE_BYTES["float32"] if narrow else 0


# --------------------------------------------------------------------------------------------- LSTM


def _leading_dimension(columns: int) -> int:
    """Columns of a matrix in memory: whole cache lines, and not a multiple of 256 (4 KiB aliasing).

    Source: oneDNN, src/cpu/rnn/rnn_utils.cpp, `get_good_ld`.

    >>> _leading_dimension(70), _leading_dimension(512)
    (80, 528)
    """
    padded = _rounded(columns, _BLOCK)
    return padded + _BLOCK if padded % 256 == 0 else padded


def lstm_reserve_bytes(length: int, batch: int, input_size: int, hidden_size: int) -> int:
    """Bytes of the fourth output of `mkldnn_rnn_layer`, which forward keeps for backward.

    Gates of every step; hidden and cell states and their gradients (one step and one layer more: five
    arrays); and the outputs. Each begins on a page of its own. Fake kernels say 0.
    Source: oneDNN, src/cpu/rnn/rnn_utils.cpp, `set_offsets`; measured for hidden sizes that are whole
    cache lines (other sizes come out up to 3 % high).

    >>> lstm_reserve_bytes(64, 8, 256, 128)
    5812224
    """
    item = DTYPE_BYTES["float32"]
    gates = length * batch * _leading_dimension(4 * hidden_size) * item
    rows = 2 * (length + 1) * batch
    layer_states = rows * _leading_dimension(max(input_size, hidden_size)) * item
    cell_states = rows * _leading_dimension(hidden_size) * item
    outputs = length * batch * hidden_size * item
    arrays = (gates, *(layer_states,) * 3, *(cell_states,) * 2, outputs)
    return sum(_rounded(size, _PAGE_BYTES) for size in arrays)


_RNN_SCRATCHPAD_REST_BYTES = 12_856
"""Everything in the scratchpad but the gates: three pages and a header, the same for all shapes
measured."""


def _lstm_running_bytes(sig: Signature, length: int, batch: int) -> int:
    """Both weights with padded rows, and the gates in a scratchpad."""
    weights = 0
    for position in (1, 2):
        rows, columns = sig.inputs[position].shape
        weights += columns * _leading_dimension(rows) * DTYPE_BYTES["float32"]
    gates = length * batch * _leading_dimension(sig.inputs[1].shape[0]) * DTYPE_BYTES["float32"]
    return weights + _rounded(gates, _PAGE_BYTES) + _RNN_SCRATCHPAD_REST_BYTES


@workspace("aten.mkldnn_rnn_layer")
def lstm_layer(sig: Signature) -> int:
    """The sum of both biases, reordered weights, and the scratchpad with the gates.

    Source: aten/src/ATen/native/mkldnn/RNN.cpp, `mkldnn_rnn_layer`.
    """
    length, batch, _ = sig.inputs[0].shape
    bias = sig.inputs[1].shape[0] * DTYPE_BYTES["float32"]
    return bias + _lstm_running_bytes(sig, length, batch)


@workspace("aten.mkldnn_rnn_layer_backward")
def lstm_layer_backward(sig: Signature) -> int:
    """The same, zeros for the gradients that are missing, and weights once more where rows are padded.

    Source: aten/src/ATen/native/mkldnn/RNN.cpp, `mkldnn_rnn_layer_backward`.
    """
    length, batch, _ = sig.inputs[0].shape
    hidden = sig.inputs[2].shape[1]
    item = DTYPE_BYTES["float32"]
    bias = sig.inputs[1].shape[0] * item
    absent = (argument(sig, 11, "grad_hy"), argument(sig, 12, "grad_cy"))
    missing = sum(value is None for value in absent)
    zeros = missing * batch * hidden * item
    again = 0
    for position in (1, 2):
        rows, columns = sig.inputs[position].shape
        if _leading_dimension(columns) != columns:
            again += rows * _leading_dimension(columns) * item
    copy = contiguous_copy_bytes(sig.inputs[10]) if len(sig.inputs) > 10 else 0
    return bias + zeros + copy + again + _lstm_running_bytes(sig, length, batch)
