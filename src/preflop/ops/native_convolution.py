"""What torch's own convolutions allocate inside, where oneDNN is not asked: columns, and tensors group by group.

Each kernel unfolds what it reads into columns and multiplies them with the weight: the whole batch's at
once, or one sample's where the kernel is dilated. Only the three-dimensional one knows groups; for the others
torch slices each group out, convolves it, and joins the results, which are all alive then.

Source: aten/src/ATen/native/Convolution.cpp (`_convolution`, `convolution_backward`, `subtensor`),
ConvolutionMM2d.cpp, ConvolutionMM3d.cpp, NaiveDilatedConvolution.cpp, NaiveConvolutionTranspose2d.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from preflop.strides import is_channels_last, lies_contiguous
from preflop.tape.events import TensorMeta

_VOLUME_AXES = 5


@dataclass(frozen=True, slots=True)
class NativeConvolution:
    """One convolution by torch's own kernels. `y` is the result, or in backward its gradient."""

    x: TensorMeta
    weight: TensorMeta
    y: TensorMeta
    groups: int
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool

    def forward_bytes(self) -> int:
        """Columns and a slice of the input while the last group runs, or all results while they are joined."""
        copies = self._dense_bytes(self.x) + self._dense_bytes(self.weight)
        columns = self._columns_bytes
        if self._sample_columns and not self.transposed:
            columns //= self.x.shape[0]
        if not self._by_group:
            return copies + columns
        return copies + max(self.y.bytes, self._slice_bytes(self.x, whole_is_dense=True) + columns)

    def backward_bytes(self, *, wants_input: bool, wants_weight: bool, made_bytes: int) -> int:
        """As forward, with a slice of the result's gradient besides.

        Args:
            made_bytes: of the gradients that are returned.
        """
        copies = self._dense_bytes(self.x) + self._dense_bytes(self.weight)
        columns = self._backward_columns_bytes(wants_input=wants_input, wants_weight=wants_weight)
        if not self._by_group:
            reads = wants_input or wants_weight
            return copies + columns + (self._dense_bytes(self.y) if reads else 0)
        slices = self._slice_bytes(self.x, whole_is_dense=True) + self._slice_bytes(self.y, whole_is_dense=False)
        return copies + max(made_bytes, slices + columns)

    @property
    def _volume(self) -> bool:
        return len(self.x.shape) == _VOLUME_AXES and not self._sample_columns

    @property
    def _by_group(self) -> bool:
        return self.groups > 1 and not self._volume

    @property
    def _sample_columns(self) -> bool:
        """Whether columns are one sample's."""
        return max(self.dilation) > 1 or self.transposed

    @property
    def _pointwise(self) -> bool:
        """A 1 x 1 kernel multiplies its input as it lies."""
        plain = max(self.stride) == 1 and prod(self.weight.shape[2:]) == 1 and not any(self.padding)
        return plain and max(self.dilation) == 1

    @property
    def _columns_bytes(self) -> int:
        """Columns of the whole batch, of one group where groups run one by one.

        A transposed convolution has one column per position that it reads, also for 1 x 1 kernels.
        """
        return 0 if self._pointwise and not self.transposed else self._unfolded_bytes

    @property
    def _unfolded_bytes(self) -> int:
        read, made = (self.y, self.x) if self.transposed else (self.x, self.y)
        groups = 1 if self._by_group else self.groups
        channels = read.shape[1] // self.groups * groups
        per_sample = channels * prod(self.weight.shape[2:]) * prod(made.shape[2:])
        return self.x.shape[0] * per_sample * self.x.itemsize

    def _backward_columns_bytes(self, *, wants_input: bool, wants_weight: bool) -> int:
        """The input's gradient comes first. An image's is unfolded in memory that the allocator does not see, a
        volume's in its own, also for 1 x 1 kernels, while the weight's gradient does not exist yet."""
        columns = self._columns_bytes
        if not self._sample_columns:
            before = 0
            if self._volume and wants_input:
                before = self._unfolded_bytes - (self.weight.bytes if wants_weight else 0)
            return max(before, columns if wants_weight else 0)
        if self._pointwise or not (wants_input or wants_weight):
            return 0
        return columns // self.x.shape[0]

    @property
    def _channels_last(self) -> bool:
        return len(self.x.shape) == 4 and any(is_channels_last(m.shape, m.stride) for m in (self.x, self.weight))

    def _dense_bytes(self, meta: TensorMeta) -> int:
        """The copy of a tensor in the memory format that the kernel takes, if it does not lie so."""
        return 0 if self._is_dense(meta) else meta.bytes

    def _is_dense(self, meta: TensorMeta) -> bool:
        order = _channels_innermost(meta) if self._channels_last else range(len(meta.shape))
        return lies_contiguous(_picked(meta.shape, order), _picked(meta.stride, order))

    def _slice_bytes(self, meta: TensorMeta, *, whole_is_dense: bool) -> int:
        """The copy of one group's channels: none of one sample whose channels are the outermost axis then."""
        dense = whole_is_dense or self._is_dense(meta)
        return 0 if meta.shape[0] == 1 and dense and not self._channels_last else meta.bytes // self.groups


def _channels_innermost(meta: TensorMeta) -> Sequence[int]:
    return (0, *range(2, len(meta.shape)), 1)


def _picked(sizes: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    return tuple(sizes[axis] for axis in order)
