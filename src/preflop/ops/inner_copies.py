"""Copies that a kernel makes inside itself, below the dispatcher: no call on the tape shows them.

Each rule says what ATen's kernel copies, from the call's shapes, strides and dtypes, and why. All were
read from ATen's source and are held to what torch's profiler shows inside each call (tests/copies).

May import: tape, ops, strides, units. Never torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from preflop.ops.arguments import argument, keyword, need, tensor, tensors
from preflop.ops.onednn import asks_onednn
from preflop.ops.workspace import thread_count, vector_bytes
from preflop.strides import is_channels_last, lies_contiguous, view_strides
from preflop.tape.events import Ref, Signature, TensorMeta
from preflop.units import AVX2_BYTES, DTYPE_BYTES, a_dtype


@dataclass(frozen=True, slots=True)
class InnerCopy:
    """One copy kernel inside a call."""

    kind: str
    """"scalar", "cast", "bias", "contiguous", "slice", "pad", "repeat", "clone", "fill", "copy"."""
    shape: tuple[int, ...]
    dtype: str
    """Of what is written."""
    reason: str
    instead: str | None = None
    cpu_only: bool = False
    """A GPU's kernel does without it."""

    @property
    def bytes(self) -> int:
        """Bytes written."""
        count = DTYPE_BYTES[self.dtype]
        for size in self.shape:
            count *= size
        return count


Rule = Callable[[Signature], Iterable[InnerCopy]]
RULES: dict[str, Rule] = {}


def _rule(*names: str, in_place: bool = False) -> Callable[[Rule], Rule]:
    """Register a rule for operators aten.<name>, and aten.<name>_ where they have the same kernel."""

    def register(rule: Rule) -> Rule:
        for name in names:
            for full in (f"aten.{name}", *([f"aten.{name}_"] if in_place else ())):
                if full in RULES:
                    raise ValueError(f"{full} has a rule already")
                RULES[full] = rule
        return rule

    return register


def copies_of(sig: Signature) -> tuple[InnerCopy, ...]:
    """The copies that one call makes inside its kernel; none for operators without a rule."""
    rule = RULES.get(sig.op)
    return () if rule is None else tuple(rule(sig))


# --------------------------------------------------------------------------------- type promotion

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_COMPLEX = ("complex32", "complex64", "complex128")
_INTEGERS = ("uint8", "int8", "int16", "int32", "int64")
_OF_PYTHON = {bool: "bool", int: "int64", float: "float64", complex: "complex128"}
_DEFAULT_OF = {"float": "float32", "complex": "complex64"}


def _category(dtype: str) -> int:
    if dtype == "bool":
        return 0
    return 1 if "int" in dtype else 3 if dtype.startswith("complex") else 2


def _joined(first: str, second: str) -> str:
    """torch.promote_types.

    >>> _joined("bfloat16", "float16"), _joined("int64", "float16"), _joined("bool", "uint8")
    ('float32', 'float16', 'uint8')
    """
    if first == second:
        return first
    a, b = _category(first), _category(second)
    if a != b:
        low, high = (first, second) if a < b else (second, first)
        wide = {"float64": "complex128", "float16": "complex32"}.get(low, "complex64")
        return _joined(high, wide) if _category(high) == 3 and _category(low) == 2 else high
    order = _FLOATS if a == 2 else _COMPLEX if a == 3 else _INTEGERS
    if {first, second} == {"bfloat16", "float16"}:
        return "float32"
    if "uint8" in (first, second) and "int8" in (first, second):
        return "int16"
    ranked = sorted((first, second), key=lambda name: order.index(name) if name in order else -1)
    return ranked[-1]


def result_dtype(operands: Sequence[TensorMeta | bool | int | float | complex]) -> str:
    """The dtype that a call computes in: torch.result_type over tensors and Python numbers.

    Tensors with axes decide; tensors without axes, then numbers, only by their category.

    >>> x = TensorMeta((2,), (1,), 0, "bfloat16")
    >>> result_dtype([x, 2.0]), result_dtype([x, TensorMeta((), (), 0, "float32")])
    ('bfloat16', 'bfloat16')

    Source: ATen/native/TypeProperties.cpp, result_type.
    """
    found: list[str | None] = [None, None, None]
    for operand in operands:
        rank = 2 if not isinstance(operand, TensorMeta) else 0 if operand.shape else 1
        dtype = operand.dtype if isinstance(operand, TensorMeta) else _number_dtype(operand)
        held = found[rank]
        found[rank] = dtype if held is None else _joined(held, dtype)
    axes, none, numbers = found
    return _combined(axes, _combined(none, numbers)) or "float32"


def _combined(higher: str | None, lower: str | None) -> str | None:
    """torch's combine_categories: the higher sort of operand keeps its dtype within its category."""
    if higher is None or lower is None:
        return higher or lower
    if _category(higher) == 3:
        return higher
    if _category(higher) == 2:
        wide = {"float64": "complex128", "float16": "complex32"}.get(higher, "complex64")
        return wide if _category(lower) == 3 else higher
    if higher == "bool" or _category(lower) > 1:
        return _joined(higher, lower)
    return higher


def _number_dtype(value: bool | int | float | complex) -> str:
    """As an operand a number counts as its category's default dtype."""
    kind = _OF_PYTHON[type(value)]
    return {"float64": "float32", "complex128": "complex64"}.get(kind, kind)


def _is_number(value: object) -> bool:
    return isinstance(value, bool | int | float | complex)


def _operands(sig: Signature, positions: Iterable[int], names: Sequence[str] = ()) -> list[object]:
    found: list[object] = []
    for index, position in enumerate(positions):
        value = argument(sig, position, names[index] if index < len(names) else "")
        if isinstance(value, Ref):
            found.append(sig.inputs[value.index])
        elif _is_number(value):
            found.append(value)
    return found


def _promoted(sig: Signature, operands: Sequence[object], to_float: bool = False) -> list[InnerCopy]:
    """Operands that the CPU's TensorIterator casts to the common dtype before it begins, and the result it
    casts back where the call writes in place in another dtype.

    Source: ATen/TensorIterator.cpp, compute_types.
    """
    common = result_dtype(operands)  # type: ignore[arg-type]
    if to_float and _category(common) < 2:
        common = "float32"
    copies = []
    for operand in operands:
        if isinstance(operand, TensorMeta):
            if operand.dtype != common:
                copies.append(_cast(operand, common, sig.op))
        elif _OF_PYTHON[type(operand)] != common:
            copies.append(
                InnerCopy("scalar", (), common, f"a number becomes {a_dtype(common)} tensor", cpu_only=True)
            )
    for index in sig.writes:
        target = sig.inputs[index]
        if target.dtype != common and target.elements:
            copies.append(
                InnerCopy("cast", target.shape, target.dtype, f"computed in {common}, kept in {target.dtype}",
                          cpu_only=True)
            )  # fmt: skip
    return copies


def _cast(operand: TensorMeta, dtype: str, op: str) -> InnerCopy:
    name = op.removeprefix("aten.")
    return InnerCopy(
        "cast", operand.shape, dtype,
        f"{name} computes in {dtype}: shape {operand.shape} is cast from {operand.dtype}",
        "keep both operands in one dtype", cpu_only=True,
    )  # fmt: skip


_BINARY = (
    "add sub mul remainder fmod fmax fmin maximum minimum bitwise_and bitwise_or bitwise_xor "
    "floor_divide hypot copysign eq ne lt le gt ge logical_and logical_or logical_xor heaviside nextafter "
    "gcd lcm"
)


@_rule(*_BINARY.split(), in_place=True)
def _binary(sig: Signature) -> Iterable[InnerCopy]:
    return _promoted_in(sig, _operands(sig, (0, 1), ("self", "other")))


def _promoted_in(sig: Signature, operands: Sequence[object], to_float: bool = False) -> list[InnerCopy]:
    """Comparisons write a bool from whatever they computed in: no cast back unless in place."""
    return _promoted(sig, operands, to_float)


@_rule("rsub")
def _reversed(sig: Signature) -> Iterable[InnerCopy]:
    return _promoted(sig, _operands(sig, (0, 1), ("self", "other")))


@_rule("div", "true_divide", "atan2", "xlogy", "logaddexp", in_place=True)
def _dividing(sig: Signature) -> Iterable[InnerCopy]:
    whole = keyword(sig, "rounding_mode") is not None
    return _promoted(sig, _operands(sig, (0, 1), ("self", "other")), to_float=not whole)


@_rule("pow", in_place=True)
def _power(sig: Signature) -> Iterable[InnerCopy]:
    """x ** 1 copies x; a number as base becomes a tensor; a number as exponent does not."""
    base, exponent = (argument(sig, 0, "self"), argument(sig, 1, "exponent"))
    operands = _operands(sig, (0, 1), ("self", "exponent"))
    if not _is_number(exponent):
        return () if base == 1 else _promoted(sig, operands)
    meta = sig.inputs[0]
    common = result_dtype(operands)  # type: ignore[arg-type]
    if exponent == 0:
        return ()
    if exponent == 1:
        reason = "a power of 1 copies its operand (the gradient of a square asks for it)"
        return (InnerCopy("copy", meta.shape, common, reason, "x * x instead of x ** 2"),)
    return [_cast(meta, common, sig.op)] if meta.dtype != common else ()


@_rule("where")
def _where(sig: Signature) -> Iterable[InnerCopy]:
    return _promoted(sig, _operands(sig, (1, 2), ("self", "other")))


@_rule("clamp", "clamp_min", "clamp_max", in_place=True)
def _clamp(sig: Signature) -> Iterable[InnerCopy]:
    operands = _operands(sig, (0, 1, 2), ("self", "min", "max"))
    common = result_dtype(operands)  # type: ignore[arg-type]
    return [
        _cast(meta, common, sig.op)
        for meta in operands
        if isinstance(meta, TensorMeta) and meta.dtype != common
    ]


@_rule("addcmul", "addcdiv", in_place=True)
def _three(sig: Signature) -> Iterable[InnerCopy]:
    return _promoted(sig, _operands(sig, (0, 1, 2), ("self", "tensor1", "tensor2")))


_TO_FLOAT = (
    "sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh sigmoid erf "
    "erfc reciprocal lgamma digamma"
)


@_rule(*_TO_FLOAT.split())
def _of_integers(sig: Signature) -> Iterable[InnerCopy]:
    meta = sig.inputs[0]
    return [_cast(meta, "float32", sig.op)] if _category(meta.dtype) < 2 else ()


# ------------------------------------------------------------------------------------- reductions


# at::internal::GRAIN_SIZE: below it one thread reduces alone (ATen/Parallel.h).
_GRAIN_ELEMENTS = 32768


def _by_threads(meta: TensorMeta, made_elements: int, dtype: str) -> Iterable[InnerCopy]:
    """Where several threads reduce to one number, each begins from a copy of its first value.

    Source: ATen/native/TensorIteratorReduce.cpp, two_pass_reduction.
    """
    if thread_count() > 1 and made_elements == 1 and meta.elements >= _GRAIN_ELEMENTS:
        reason = "each thread reduces into a place of its own"
        yield InnerCopy("copy", (thread_count(),), dtype, reason, cpu_only=True)


@_rule("sum", "nansum", "prod", "cumsum", "cumprod")
def _summed(sig: Signature) -> Iterable[InnerCopy]:
    """Summed in the dtype asked for, in int64 where the operand is an integer."""
    meta = sig.inputs[0]
    wanted = keyword(sig, "dtype") or ("int64" if _category(meta.dtype) < 2 else meta.dtype)
    if wanted != meta.dtype:
        yield _cast(meta, wanted, sig.op)
    yield from _by_threads(meta, sig.outputs[0].elements, wanted)


@_rule("amax", "amin")
def _extreme(sig: Signature) -> Iterable[InnerCopy]:
    return _by_threads(sig.inputs[0], sig.outputs[0].elements, sig.inputs[0].dtype)


@_rule("linalg_vector_norm")
def _norm(sig: Signature) -> Iterable[InnerCopy]:
    meta, wanted = sig.inputs[0], keyword(sig, "dtype")
    return [_cast(meta, wanted, sig.op)] if wanted not in (None, meta.dtype) else ()


@_rule("all", "any")
def _truth(sig: Signature) -> Iterable[InnerCopy]:
    meta = sig.inputs[0]
    if meta.dtype not in ("bool", "uint8"):
        yield _cast(meta, "bool", sig.op)
    yield from _by_threads(meta, sig.outputs[0].elements, "bool")


def _count_as_tensor(dtype: str) -> InnerCopy:
    return InnerCopy("scalar", (), dtype, f"the count to divide by becomes {a_dtype(dtype)} tensor", cpu_only=True)


@_rule("mean")
def _mean(sig: Signature) -> Iterable[InnerCopy]:
    """A sum, then a division by the count. Half precision is summed and divided in fp32."""
    meta = sig.inputs[0]
    wanted = keyword(sig, "dtype") or meta.dtype
    if wanted in ("bfloat16", "float16"):
        made = sig.outputs[0]
        yield _cast(made, "float32", sig.op)
        yield _cast(meta, "float32", sig.op)
        yield from _by_threads(meta, made.elements, "float32")
        yield _count_as_tensor("float32")
        yield InnerCopy("cast", made.shape, wanted, f"computed in float32, kept in {wanted}", cpu_only=True)
        return
    if wanted != meta.dtype:
        yield _cast(meta, wanted, sig.op)
    yield from _by_threads(meta, sig.outputs[0].elements, wanted)
    yield _count_as_tensor(wanted)


@_rule("std", "var", "std_mean", "var_mean")
def _spread(sig: Signature) -> Iterable[InnerCopy]:
    meta = sig.inputs[0]
    if argument(sig, 1, "dim") is None and sig.op in ("aten.std", "aten.var"):
        yield from _by_threads(meta, 1, meta.dtype)
        yield _count_as_tensor(meta.dtype)


# Reductions of losses: 0 none, 1 mean, 2 sum (ATen/native/Loss.h).
_MEAN = 1
_LOSS_REDUCTION = {"binary_cross_entropy_with_logits": 4, "mse_loss": 2, "smooth_l1_loss": 2, "huber_loss": 2}


@_rule(*_LOSS_REDUCTION)
def _loss(sig: Signature) -> Iterable[InnerCopy]:
    operands = _operands(sig, (0, 1))
    reduced = argument(sig, _LOSS_REDUCTION[sig.op.removeprefix("aten.")], "reduction", _MEAN)
    casts = _promoted(sig, operands)
    yield from casts
    if reduced and sig.op == "aten.mse_loss":
        yield from casts  # built once to learn the dtype, once to run
    if reduced:
        yield from _by_threads(sig.inputs[0], 1, result_dtype(operands))  # type: ignore[arg-type]
    if reduced == _MEAN:
        yield _count_as_tensor(result_dtype(operands))  # type: ignore[arg-type]


@_rule("logsumexp", "isinf")
def _infinite(sig: Signature) -> Iterable[InnerCopy]:
    dtype = sig.inputs[0].dtype
    if dtype in _FLOATS and dtype != "float64":
        yield InnerCopy("scalar", (), dtype, f"infinity becomes {a_dtype(dtype)} tensor", cpu_only=True)


@_rule("sort", "_unique2")
def _sorted(sig: Signature) -> Iterable[InnerCopy]:
    meta = sig.inputs[0]
    if meta.elements:
        yield InnerCopy(
            "copy", meta.shape, meta.dtype, "sort works in place on a copy of its operand", cpu_only=True
        )
        yield InnerCopy(
            "copy", meta.shape, "int64", "sort writes the positions before it sorts them", cpu_only=True
        )


@_rule("kthvalue", "median")
def _selected(sig: Signature) -> Iterable[InnerCopy]:
    meta = sig.inputs[0]
    yield InnerCopy("copy", meta.shape, meta.dtype, "the selection works in place on a copy", cpu_only=True)


# --------------------------------------------------------- functional forms of in-place operators

_CLONING = (
    "masked_fill masked_scatter scatter scatter_add scatter_reduce index_add index_copy index_fill index_put "
    "index_reduce slice_scatter select_scatter diagonal_scatter as_strided_scatter"
)


@_rule(*_CLONING.split())
def _cloning(sig: Signature) -> Iterable[InnerCopy]:
    """The result begins as a copy of the operand; the in-place form does not."""
    name, made = sig.op.removeprefix("aten."), sig.outputs[0]
    reason = f"{name} copies shape {made.shape} and then changes the copy"
    instead = f"{name}_ in place, where autograd does not need the old values"
    if name == "masked_fill":
        instead = "torch.where(mask, value, x): one kernel, no copy first"
    yield InnerCopy("clone", made.shape, made.dtype, reason, instead)


@_rule("fill_")
def _filled(sig: Signature) -> Iterable[InnerCopy]:
    if len(sig.inputs) > 1:
        made = sig.inputs[0]
        yield InnerCopy("fill", made.shape, made.dtype, f"shape {made.shape} is filled from a tensor")


# ------------------------------------------------------------------------------ gradients of views


@_rule("slice_backward", "select_backward", "diagonal_backward")
def _view_backward(sig: Signature) -> Iterable[InnerCopy]:
    """The gradient of a slice is written into zeros of the whole shape."""
    grad, made = sig.inputs[0], sig.outputs[0]
    name = sig.op.removeprefix("aten.").removesuffix("_backward")
    reason = f"the gradient of a {name}, shape {grad.shape}, is written into zeros of shape {made.shape}"
    yield InnerCopy(
        "slice",
        grad.shape,
        grad.dtype,
        reason,
        "chunk, split or unbind the tensor once instead of slicing it several times",
    )


# ----------------------------------------------------------------------------- joining and repeating


@_rule("constant_pad_nd")
def _padded(sig: Signature) -> Iterable[InnerCopy]:
    meta, pads = sig.inputs[0], argument(sig, 1, "pad", ())
    sizes = list(meta.shape)
    for index in range(len(pads) // 2):
        sizes[len(sizes) - 1 - index] += min(pads[2 * index], 0) + min(pads[2 * index + 1], 0)
    reason = f"padding {tuple(pads)} copies shape {tuple(sizes)} into one of shape {sig.outputs[0].shape}"
    yield InnerCopy(
        "pad", tuple(sizes), meta.dtype, reason, "make the tensor with its final size and write into it"
    )


@_rule("repeat")
def _repeated(sig: Signature) -> Iterable[InnerCopy]:
    meta, made = sig.inputs[0], sig.outputs[0]
    reason = f"shape {meta.shape} is repeated to {made.shape}"
    yield InnerCopy("repeat", made.shape, made.dtype, reason, "expand: a view with stride 0")


@_rule("cat", "stack")
def _joined_in(sig: Signature) -> Iterable[InnerCopy]:
    made = sig.outputs[0]
    return [
        _cast(meta, made.dtype, sig.op) for meta in sig.inputs if meta.dtype != made.dtype and meta.elements
    ]


@_rule("diag_embed")
def _diagonal(sig: Signature) -> Iterable[InnerCopy]:
    meta = sig.inputs[0]
    yield InnerCopy("copy", meta.shape, meta.dtype, f"shape {meta.shape} is written on the diagonal of zeros")


# ------------------------------------------------------------------------------------------ matmuls


def _is_blas_matrix(meta: TensorMeta) -> bool:
    """Whether a matrix lies as BLAS takes it: one axis dense, the other at least a row apart.

    Source: ATen/native/LinearAlgebra.cpp, addmm_impl_cpu_.
    """
    (rows, columns), (down, across) = meta.shape, meta.stride
    return (across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows))


def _for_blas(metas: Iterable[TensorMeta]) -> Iterable[InnerCopy]:
    for meta in metas:
        if meta.elements and not _is_blas_matrix(meta):
            reason = f"shape {meta.shape} with strides {meta.stride} is no matrix that BLAS takes"
            yield InnerCopy(
                "contiguous", meta.shape, meta.dtype, reason, "make one axis dense before the product"
            )


@_rule("mm")
def _mm(sig: Signature) -> Iterable[InnerCopy]:
    return _for_blas(sig.inputs[:2])


# oneDNN takes a half-precision product of more multiply-adds than this (ATen/native/mkldnn/Matmul.cpp).
_ONEDNN_TERMS = 16 * 16 * 16


@_rule("bmm")
def _bmm(sig: Signature) -> Iterable[InnerCopy]:
    """oneDNN's batched product in half precision takes operands that are contiguous, or contiguous but for
    their last two axes.

    It has none for a CPU without AVX-512, where torch multiplies itself. Source: ATen/native/mkldnn/Matmul.cpp,
    is_mkldnn_optimized_format, and Utils.h, mkldnn_bf16_device_check.
    """
    if vector_bytes() <= AVX2_BYTES:
        return
    first, second = sig.inputs[:2]
    terms = first.elements * second.shape[2]
    if first.dtype not in ("bfloat16", "float16") or terms <= _ONEDNN_TERMS:
        return
    for meta in (first, second):
        batch, rows, columns = meta.shape
        turned = meta.stride == (rows * columns, 1, rows)
        if not turned:
            yield from _dense(meta, sig.op)


def _bias(sig: Signature) -> Iterable[InnerCopy]:
    """The bias is written into the result, and the product added to it."""
    made = sig.outputs[0]
    if keyword(sig, "beta", 1) != 0 and made.elements:
        source = sig.inputs[0].shape
        reason = (
            f"shape {source} is written into the result of shape {made.shape}; the product is added to it"
        )
        yield InnerCopy(
            "bias", made.shape, made.dtype, reason, "bias=False, where a norm follows", cpu_only=True
        )


@_rule("addmm")
def _addmm(sig: Signature) -> Iterable[InnerCopy]:
    yield from _bias(sig)
    yield from _for_blas(sig.inputs[1:3])


@_rule("baddbmm", "addbmm")
def _batched_bias(sig: Signature) -> Iterable[InnerCopy]:
    return _bias(sig)


# -------------------------------------------------------------------- kernels that want dense operands


def _dense(meta: TensorMeta | None, op: str, wants: str = "contiguous") -> Iterable[InnerCopy]:
    """A copy where a tensor does not lie as the kernel takes it: contiguous, or channels last."""
    if meta is None or not meta.elements:
        return
    last = wants == "channels last"
    if lies_channels_last(meta) if last else lies_contiguous(meta.shape, meta.stride):
        return
    reason = (
        f"{op.removeprefix('aten.')} takes {wants} operands: shape {meta.shape} has strides {meta.stride}"
    )
    yield InnerCopy(
        "contiguous", meta.shape, meta.dtype, reason, "lay the tensor out like that where it is made"
    )


def lies_channels_last(meta: TensorMeta) -> bool:
    """Whether a tensor of 4 or 5 axes is dense with its channels innermost."""
    order = (0, *range(2, len(meta.shape)), 1)
    shape = tuple(meta.shape[axis] for axis in order)
    return lies_contiguous(shape, tuple(meta.stride[axis] for axis in order))


def _suggests_channels_last(meta: TensorMeta | None) -> bool:
    return meta is not None and is_channels_last(meta.shape, meta.stride)


@_rule("native_layer_norm", "_softmax", "_log_softmax", "nll_loss_forward", "im2col")
def _first_dense(sig: Signature) -> Iterable[InnerCopy]:
    return _dense(sig.inputs[0], sig.op)


@_rule("native_layer_norm_backward", "_softmax_backward_data", "_log_softmax_backward_data")
def _two_dense(sig: Signature) -> Iterable[InnerCopy]:
    for meta in sig.inputs[:2]:
        yield from _dense(meta, sig.op)


@_rule("embedding")
def _looked_up(sig: Signature) -> Iterable[InnerCopy]:
    """Indices are flattened."""
    indices = need(sig, 1, "indices")
    if len(indices.shape) > 1 and view_strides(indices.shape, indices.stride, (indices.elements,)) is None:
        reason = (
            f"indices {indices.shape} with strides {indices.stride} cannot be viewed as {(indices.elements,)}"
        )
        yield InnerCopy("contiguous", indices.shape, indices.dtype, reason, "contiguous indices")


@_rule("embedding_dense_backward")
def _looked_up_backward(sig: Signature) -> Iterable[InnerCopy]:
    for meta in (need(sig, 1, "indices"), need(sig, 0, "grad_output")):
        yield from _dense(meta, sig.op)


@_rule("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d")
def _pooled(sig: Signature) -> Iterable[InnerCopy]:
    meta = sig.inputs[0]
    return _dense(meta, sig.op, "channels last" if _suggests_channels_last(meta) else "contiguous")


# ------------------------------------------------------------------------------------- convolutions


@dataclass(frozen=True, slots=True)
class _Convolution:
    """What decides which kernel runs a convolution, and in which memory format."""

    source: TensorMeta
    weight: TensorMeta
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool

    @property
    def channels_last(self) -> bool:
        """Input and weight are brought to channels last where either of them is. (A sequence never is.)"""
        images = len(self.source.shape) > 3
        return images and any(is_channels_last(m.shape, m.stride) for m in (self.source, self.weight))

    @property
    def half(self) -> bool:
        return self.source.dtype in ("bfloat16", "float16")

    @property
    def strided(self) -> bool:
        return max(self.stride) > 1

    @property
    def wide(self) -> bool:
        """Groups of more channels than oneDNN's blocks hold (measured; AVX-512's blocks hold 16)."""
        return self.groups == 1 or self.weight.shape[0] // self.groups > 16

    @property
    def by_onednn(self) -> bool:
        return asks_onednn(self.source, self.weight, self.stride, self.dilation, self.groups)


@_rule("convolution")
def _convolved(sig: Signature) -> Iterable[InnerCopy]:
    """Input and weight are brought to one memory format, and oneDNN's own format back to the caller's."""
    case = _Convolution(
        need(sig, 0, "input"), need(sig, 1, "weight"), argument(sig, 3, "stride"),
        argument(sig, 5, "dilation"), argument(sig, 8, "groups"), bool(argument(sig, 6, "transposed")),
    )  # fmt: skip
    wants = "channels last" if case.channels_last else "contiguous"
    for meta in (case.source, case.weight):
        yield from _dense(meta, sig.op, wants)
    made = sig.outputs[0]
    if not case.by_onednn:
        if tensor(sig, 2, "bias") is not None and case.source.dtype == "float32":
            reason = (
                f"the bias is written into the result of shape {made.shape}; the products are added to it"
            )
            yield InnerCopy("bias", made.shape, made.dtype, reason, cpu_only=True)
    elif not case.channels_last and (case.half or (case.transposed and case.strided)):
        yield _from_onednn(made, "result")


def _from_onednn(made: TensorMeta, what: str) -> InnerCopy:
    reason = f"oneDNN makes the {what} channels last: shape {made.shape} is copied to contiguous"
    return InnerCopy("contiguous", made.shape, made.dtype, reason, _CHANNELS_LAST, cpu_only=True)


_CHANNELS_LAST = "channels last throughout: model.to(memory_format=torch.channels_last), and the images too"


@_rule("convolution_backward")
def _convolved_backward(sig: Signature) -> Iterable[InnerCopy]:
    grad, source, weight = need(sig, 0, "grad_output"), need(sig, 1, "input"), need(sig, 2, "weight")
    case = _Convolution(
        source, weight, argument(sig, 4, "stride"), argument(sig, 6, "dilation"), argument(sig, 9, "groups"),
        bool(argument(sig, 7, "transposed")),
    )  # fmt: skip
    wants_source, wants_weight, _ = argument(sig, 10, "output_mask")
    wants = "channels last" if case.channels_last else "contiguous"
    gradients = list(_dense(grad, sig.op, wants))
    yield from gradients
    if not case.by_onednn and wants_source and wants_weight and len(source.shape) < 5:
        yield from gradients  # once for each of the two gradients
    for meta in (source, weight):
        yield from _dense(meta, sig.op, wants)
    if not case.by_onednn:
        return
    if case.channels_last:
        if wants_weight:
            reason = f"the weight's gradient is copied to channels last, shape {weight.shape}"
            yield InnerCopy("contiguous", weight.shape, weight.dtype, reason, cpu_only=True)
    elif wants_source and (case.half or (case.strided and case.wide and not case.transposed)):
        yield _from_onednn(source, "input's gradient")


# ---------------------------------------------------------------------------------------- recurrent


@_rule("mkldnn_rnn_layer_backward")
def _recurrent_backward(sig: Signature) -> Iterable[InnerCopy]:
    """Both biases have the same gradient, in memory of their own."""
    if len(sig.inputs) > 10:
        yield from _dense(sig.inputs[10], sig.op)
    gates = (sig.inputs[1].shape[0],)
    reason = "both biases have one gradient: it is copied for the second"
    yield InnerCopy("clone", gates, sig.inputs[1].dtype, reason, cpu_only=True)


@_rule("_embedding_bag")
def _bagged(sig: Signature) -> Iterable[InnerCopy]:
    """The sizes of the bags are written from the offsets."""
    offsets = need(sig, 2, "offsets")
    bags = offsets.elements
    for shape in ((bags - 1,), (), (bags,)):
        yield InnerCopy("copy", shape, offsets.dtype, "sizes of bags from their offsets", cpu_only=True)
    if argument(sig, 4, "mode", 0) == 1:
        table = sig.inputs[0].dtype
        yield InnerCopy("cast", (bags,), table, "a mean divides by the sizes of bags", cpu_only=True)


@_rule("_embedding_bag_backward")
def _bagged_backward(sig: Signature) -> Iterable[InnerCopy]:
    yield from _dense(need(sig, 0, "grad"), sig.op)
    indices = need(sig, 1, "indices")
    for _ in range(2):
        yield InnerCopy("copy", indices.shape, indices.dtype, "indices are sorted in a copy", cpu_only=True)


# ------------------------------------------------------------------------------------ lists of tensors


def _foreach(sig: Signature) -> Iterable[InnerCopy]:
    """On a CPU the tensors are taken one by one, each with its own number."""
    others = argument(sig, 1, "other")
    for index, meta in enumerate(tensors(sig, 0, "self")):
        other = others
        if isinstance(others, tuple):
            other = others[index]
        elif isinstance(others, Ref):
            other = others
        operand = sig.inputs[other.index] if isinstance(other, Ref) else other
        if operand is None:
            continue
        single = Signature(sig.op, sig.overload, (), (), (meta,), (), (), (0,) if sig.writes else ())
        yield from _promoted(single, [meta, operand], to_float="div" in sig.op)


for _name in ("add", "sub", "mul", "div"):
    RULES[f"aten._foreach_{_name}"] = RULES[f"aten._foreach_{_name}_"] = _foreach


@_rule("_foreach_copy_")
def _foreach_copied(sig: Signature) -> Iterable[InnerCopy]:
    for meta in tensors(sig, 0, "self"):
        yield InnerCopy("copy", meta.shape, meta.dtype, f"shape {meta.shape} is written into another tensor")


__all__ = ["InnerCopy", "copies_of", "result_dtype", "tensor"]
