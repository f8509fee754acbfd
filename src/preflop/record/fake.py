"""Running a call without memory or arithmetic, and for real where that is cheap and tells values.

The rule ("know what is cheap to know"): floating parameters, buffers and inputs are fake; integer and
boolean tensors and small constants are real, and a call whose tensors are all real and whose results
are small runs for real, so that `.item()`, `nonzero` and branches on masks do what they would do.
Whatever touches a fake tensor is fake.

A fake result is made from a *plan*: which outputs are fresh, which are views of an input, which are the
input itself. The plan of one (operator, shapes, strides, dtypes, scalars) is found once, by torch's own
FakeTensorMode, and reused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

from preflop.errors import BadSubject
from preflop.ops.workspace_lstm import lstm_reserve_bytes
from preflop.record.dtypes_agree import check_dtypes
from preflop.record.layouts import WANTS_DENSE, first_stride
from preflop.record.storages import dtype_name
from preflop.tape.events import TensorMeta

# A real result may have at most so many bytes: integer and boolean ones are position tables, ids and
# masks (a 8192 x 8192 mask has 64 MiB), floating ones drop-path tables and the like.
INTEGER_LIMIT_BYTES = 128 * 2**20
FLOAT_LIMIT_BYTES = 256 * 2**10
# Floating masks made of known booleans are real while all together take no more than this.
MASKS_LIMIT_BYTES = 2**30
# A floating tensor from before the recording is taken for its values only when it is this small.
FOREIGN_FLOAT_ELEMENTS = 4096

CPU = torch.device("cpu")
aten = torch.ops.aten


@final
@dataclass(frozen=True, slots=True)
class Fresh:
    """An output with memory of its own."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    offset: int = 0


@final
@dataclass(frozen=True, slots=True)
class View:
    """An output over the storage of input `index`."""

    index: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    flags: tuple[bool, bool] = (False, False)
    """Conjugate and negative bits."""


@final
@dataclass(frozen=True, slots=True)
class Same:
    """An output that is input `index` itself."""

    index: int


@final
@dataclass(frozen=True, slots=True)
class Reshaped:
    """An output that is input `index` itself, seen anew (`transpose_`): only its metadata change."""

    index: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


Output = Fresh | View | Same | Reshaped | None


@dataclass(slots=True)
class Plan:
    """How to make the results of one kind of call."""

    outputs: tuple[Output, ...]
    pack: Callable[[list[Any]], Any]
    """From the list of outputs to what the operator returns."""
    writes: tuple[int, ...]
    """Inputs that the operator mutates."""
    signature: int = -1
    fresh_float_bytes: int = 0
    fresh_integer_bytes: int = 0
    only_views: bool = False


class FakeKernels:
    """Makes fake tensors and plans."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        # Modules that deep copy a layer copy its fake parameters; the copies stay in this mode.
        self.mode.__deepcopy__ = lambda memo: self.mode  # type: ignore[attr-defined]
        with torch.no_grad():
            template = FakeTensor(self.mode, torch.empty(0, device="meta"), CPU)
        self._template = dict(template.__dict__)
        self.corrected: Callable[[Any, Any, tuple[Output, ...]], tuple[Output, ...]] | None = None
        """What a target device returns where torch's fake kernel describes the CPU's (`target`)."""

    def wrap(self, elem: torch.Tensor, requires_grad: bool = False) -> torch.Tensor:
        """A fake CPU tensor around a meta tensor; the same as FakeTensor(mode, elem, cpu), faster."""
        fake = torch.Tensor._make_subclass(
            FakeTensor, elem, requires_grad, dispatch_device=True, device_for_backend_keys=CPU
        )
        fake.__dict__.update(self._template)
        return fake

    def empty(
        self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """A fake tensor with memory of its own."""
        return self.wrap(torch.empty_strided(shape, stride, dtype=dtype, device="meta"))

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor laid out as `tensor`, in memory of its own."""
        if not strided(tensor):
            return self.mode.from_tensor(tensor)
        return self.empty(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def make(self, output: Output, tensors: list[torch.Tensor]) -> Any:
        """One result by its plan."""
        if type(output) is Fresh:
            if output.offset or output.bytes != _dense_bytes(output):
                return self._odd(output)
            return self.wrap(
                torch.empty_strided(output.shape, output.stride, dtype=output.dtype, device="meta")
            )
        if output is None:
            return None
        if type(output) is Same:
            return tensors[output.index]
        if type(output) is Reshaped:
            return tensors[output.index].as_strided_(output.shape, output.stride, output.offset)
        return self._view(output, tensors[output.index])

    def _odd(self, output: Fresh) -> torch.Tensor:
        storage = torch.UntypedStorage(output.bytes, device="meta")
        elem = torch.empty(0, dtype=output.dtype, device="meta")
        elem.set_(storage, output.offset, output.shape, output.stride)
        return self.wrap(elem)

    def _view(self, view: View, base: torch.Tensor) -> torch.Tensor:
        storage = base.untyped_storage()
        if type(base) is not FakeTensor:
            return base.detach().as_strided(view.shape, view.stride, view.offset)
        elem = torch.empty(0, dtype=view.dtype, device="meta")
        elem.set_(storage, view.offset, view.shape, view.stride)
        if view.flags[0]:
            torch._C._set_conj(elem, True)
        if view.flags[1]:
            torch._C._set_neg(elem, True)
        return self.wrap(elem)

    def plan(
        self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]
    ) -> tuple[Plan, Any]:
        """Run the call under torch's fake mode once and read off what it returns."""
        check_dtypes(func, tensors)
        twins: dict[int, torch.Tensor] = {}

        def twin(tensor: torch.Tensor) -> torch.Tensor:
            dense = func in WANTS_DENSE and not tensor.is_contiguous()
            if type(tensor) is FakeTensor and not dense:
                return tensor
            if id(tensor) not in twins:
                shape = tuple(tensor.shape)
                stride = torch.empty(shape, device="meta").stride()
                twins[id(tensor)] = self.empty(shape, stride, tensor.dtype) if dense else self.like(tensor)
            return twins[id(tensor)]

        fake_args, fake_kwargs = tree_map_only(torch.Tensor, twin, (tuple(args), dict(kwargs)))
        inputs = [twin(tensor) for tensor in tensors]
        with self.mode:
            result = func(*fake_args, **fake_kwargs)
        flat, pack = flatten_result(result)
        outputs = tuple(plan_output(item, inputs) for item in flat)
        stride = first_stride(func, tensors)
        if stride is not None and isinstance(outputs[0], Fresh):
            outputs = (replace(outputs[0], stride=stride), *outputs[1:])
        if torch.Tag.inplace_view in func.tags:
            outputs = (_reshaped(result, inputs),)
        elif func is aten.mkldnn_rnn_layer.default:
            outputs = (*outputs[:3], _lstm_reserve(args))
        elif func in _REDUCED_IN_PLACE:
            outputs = (_reduced_in_place(func, args, kwargs, inputs, outputs[0]),)
        if self.corrected is not None:
            outputs = self.corrected(func, args, outputs)
        numbers = {i: item for i, item in enumerate(flat) if isinstance(item, (int, float))}
        if numbers:
            pack = _with_numbers(pack, numbers)
        return make_plan(func, outputs, pack, args, kwargs, tensors), result


def _reshaped(result: torch.Tensor, inputs: list[torch.Tensor]) -> Reshaped:
    index = next(index for index, tensor in enumerate(inputs) if tensor is result)
    return Reshaped(index, tuple(result.shape), result.stride(), int(result.storage_offset()))


def _lstm_reserve(args: Any) -> Fresh:
    """What oneDNN's LSTM keeps for backward, whose size torch's fake kernel does not know."""
    length, batch, size = args[0].shape
    count = lstm_reserve_bytes(length, batch, size, args[2].shape[1])
    return Fresh((count,), (1,), torch.uint8, count)


# Losses that compute every term into their result, shrink it to a scalar and keep the memory, and where
# their `reduction` stands. Source: aten/src/ATen/native/Loss.cpp (`resize_({})` of the result).
_REDUCED_IN_PLACE = {
    aten.mse_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
    aten.soft_margin_loss.default: 2,
    aten.binary_cross_entropy.default: 3,
}


def _reduced_in_place(
    func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor], output: Output
) -> Output:
    position = _REDUCED_IN_PLACE[func]
    reduction = args[position] if len(args) > position else kwargs.get("reduction", 1)
    if reduction == 0 or type(output) is not Fresh:
        return output
    terms = max(tensor.numel() for tensor in inputs)
    return Fresh((), (), output.dtype, terms * output.dtype.itemsize)


def strided(tensor: torch.Tensor) -> bool:
    """Whether the tensor is an ordinary strided one."""
    return tensor.layout is torch.strided


def make_plan(
    func: Any,
    outputs: tuple[Output, ...],
    pack: Callable[[list[Any]], Any],
    args: Any,
    kwargs: Any,
    tensors: list[torch.Tensor],
) -> Plan:
    """A plan with its totals."""
    plan = Plan(outputs, pack, written_inputs(func, args, kwargs, tensors))
    for output in outputs:
        if type(output) is Fresh:
            if output.dtype.is_floating_point or output.dtype.is_complex:
                plan.fresh_float_bytes += output.bytes
            else:
                plan.fresh_integer_bytes += output.bytes
    plan.only_views = (
        bool(outputs)
        and not plan.writes
        and all(type(output) in (View, Same) for output in outputs)
    )
    return plan


def _dense_bytes(output: Fresh) -> int:
    if 0 in output.shape:
        return 0
    extent = 1 + sum((size - 1) * step for size, step in zip(output.shape, output.stride))
    return extent * output.dtype.itemsize


def plan_output(item: Any, inputs: list[torch.Tensor]) -> Output:
    """Fresh, view of an input, or the input itself."""
    if not isinstance(item, torch.Tensor):
        return None
    for index, tensor in enumerate(inputs):
        if item is tensor:
            return Same(index)
    if not strided(item):
        raise NotImplementedError(f"layout {item.layout}")
    storage = item.untyped_storage()
    for index, tensor in enumerate(inputs):
        if strided(tensor) and tensor.untyped_storage()._cdata == storage._cdata:
            return View(
                index,
                tuple(item.shape),
                item.stride(),
                int(item.storage_offset()),
                item.dtype,
                (item.is_conj(), item.is_neg()),
            )
    return Fresh(
        tuple(item.shape), item.stride(), item.dtype, storage.nbytes(), int(item.storage_offset())
    )


def flatten_result(result: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The results of an operator as a flat list, and how to put them back."""
    if not isinstance(result, (tuple, list)):
        return [result], _only
    if not any(isinstance(item, (tuple, list)) for item in result):
        return list(result), (list if isinstance(result, list) else tuple)
    sizes: list[int | None] = []
    flat: list[Any] = []
    for item in result:
        if isinstance(item, (tuple, list)):
            sizes.append(len(item))
            flat.extend(item)
        else:
            sizes.append(None)
            flat.append(item)

    def pack(items: list[Any]) -> tuple[Any, ...]:
        packed: list[Any] = []
        position = 0
        for size in sizes:
            if size is None:
                packed.append(items[position])
                position += 1
            else:
                packed.append(list(items[position : position + size]))
                position += size
        return tuple(packed)

    return flat, pack


def _with_numbers(
    pack: Callable[[list[Any]], Any], numbers: dict[int, int | float]
) -> Callable[[list[Any]], Any]:
    """`pack` for an operator that returns numbers among its tensors (attention: sequence lengths)."""

    def pack_all(items: list[Any]) -> Any:
        return pack([numbers.get(index, item) for index, item in enumerate(items)])

    return pack_all


def _only(items: list[Any]) -> Any:
    return items[0]


_WRITES: dict[Any, tuple[tuple[int, str], ...]] = {}


def written_inputs(
    func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]
) -> tuple[int, ...]:
    """Which tensors the operator mutates, by its schema, as indices into `tensors`."""
    spots = _WRITES.get(func)
    if spots is None:
        schema = getattr(func, "_schema", None)
        arguments = schema.arguments if schema is not None else ()
        spots = _WRITES[func] = tuple(
            (position, argument.name)
            for position, argument in enumerate(arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
    written: list[int] = []
    for position, name in spots:
        value = args[position] if position < len(args) else kwargs.get(name)
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, torch.Tensor):
                written.append(next(i for i, tensor in enumerate(tensors) if tensor is item))
    return tuple(written)


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    """How the tensor lies in memory, as the tape has it."""
    if not strided(tensor):
        # No strides mark it as sparse; the offset then holds the number of its non-zeros.
        stored = int(tensor._nnz()) if tensor.is_sparse else 0
        return TensorMeta(tuple(tensor.shape), (), stored, dtype_name(tensor.dtype))
    return TensorMeta(
        tuple(tensor.shape),
        tuple(tensor.stride()),
        int(tensor.storage_offset()),
        dtype_name(tensor.dtype),
        "cpu" if tensor.device.type in ("cpu", "meta") else str(tensor.device),
    )


WAY_OUT = "record real steps on small sizes instead: `--real`, in Python preflop.account_real(...)"


_OF_FAKES = ("FakeTensor", "tensor subclasses", "data pointer", "meta tensor", "Meta tensor")


def way_out(error: BaseException) -> str:
    """A line for the end of a message, where torch refused because tensors have no values; else ""."""
    if "Storage size calculation overflowed" in str(error):  # c10/core, `computeStorageNbytes`
        return "\n  No memory has so many bytes: give a smaller batch or shorter sequences."
    by_type = type(error).__module__.startswith(("torch._subclasses", "torch.fx"))
    if by_type or any(words in str(error) for words in _OF_FAKES):
        return f"\n  It wants values, which a recording does not have: {WAY_OUT}."
    return ""


def cannot_record(func: Any, error: BaseException, line: str = "") -> BadSubject:
    """The error for an operator that has no fake kernel, called at `line`."""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    at = f" at {line}" if line else ""
    return BadSubject(
        f"cannot record the operator {func}{at}: it has no fake kernel ({reason}).\n"
        "  Give it one with torch.library.register_fake, leave it out of the recorded step, or\n"
        f"  {WAY_OUT}."
    )
