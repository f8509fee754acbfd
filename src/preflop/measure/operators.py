"""What each operator call of a real run allocated inside itself: the truth behind `ops/workspace.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from preflop.measure.allocations import Span, spans_of
from preflop.tape.events import Ref, Signature, TensorMeta

LABEL = "preflop.operator:"


@dataclass(frozen=True, slots=True)
class OperatorReading:
    """One operator call of a real run, with what it took from the allocator."""

    signature: Signature
    fresh_bytes: int
    """Storages of the outputs that are not storages of the inputs."""
    workspace_bytes: int
    """Peak inside the call beyond what was alive before it and `fresh_bytes`."""


class LabelEachCall(TorchDispatchMode):
    """Runs every call for real, between two marks, and notes what it looked like and what it made."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Signature, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        before = _storages((args, kwargs))
        with record_function(f"{LABEL}{len(self.seen)}"):
            result = func(*args, **kwargs)
        fresh = _storages(result)
        fresh_bytes = sum(size for key, size in fresh.items() if key not in before)
        self.seen.append((_signature(func, args, kwargs, result), fresh_bytes))
        return result


def _storages(tree: Any) -> dict[int, int]:
    """Identity of each distinct dense storage in the tree -> its bytes."""
    return {
        leaf.untyped_storage()._cdata: leaf.untyped_storage().nbytes()
        for leaf in tree_leaves(tree)
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    }


def _signature(func: Any, args: Any, kwargs: Any, result: Any) -> Signature:
    """The call as a tape keeps it, but for what it aliases."""
    inputs: list[TensorMeta] = []

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            inputs.append(_meta(value))
            return Ref(len(inputs) - 1)
        if isinstance(value, (list, tuple)):
            return tuple(plain(item) for item in value)
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        return str(value).removeprefix("torch.")

    namespace, _, name = func._schema.name.partition("::")
    arguments = tuple(plain(value) for value in args)
    keywords = tuple((key, plain(value)) for key, value in kwargs.items())
    outputs = tuple(_meta(leaf) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
    return Signature(
        op=f"{namespace}.{name}",
        overload=func._overloadname,
        args=arguments,
        kwargs=keywords,
        inputs=tuple(inputs),
        outputs=outputs,
        aliases=(None,) * len(outputs),
        writes=_written(func, arguments, keywords),
    )


def _written(func: Any, arguments: tuple[Any, ...], keywords: tuple[tuple[str, Any], ...]) -> tuple[int, ...]:
    """Which of the tensors the schema says are written."""
    given = {**dict(keywords)}
    for argument, value in zip(func._schema.arguments, arguments, strict=False):
        given[argument.name] = value
    written = [
        given.get(argument.name)
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    flat = [item for value in written for item in (value if isinstance(value, tuple) else (value,))]
    return tuple(item.index for item in flat if isinstance(item, Ref))


def _meta(tensor: torch.Tensor) -> TensorMeta:
    dense = tensor.layout is torch.strided
    return TensorMeta(
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()) if dense else (),
        offset=tensor.storage_offset() if dense else 0,
        dtype=str(tensor.dtype).removeprefix("torch."),
    )


def operator_readings(run: Callable[[], Any]) -> list[OperatorReading]:
    """What every operator call of `run` allocated, in order of the calls.

    The scratch of kernels that run on several threads is counted for `torch.get_num_threads()` threads.

    >>> [reading] = operator_readings(lambda: torch.relu(torch.empty(0)))[1:]
    >>> reading.signature.op, reading.workspace_bytes
    ('aten.relu', 0)
    """
    mode = LabelEachCall()

    def labelled() -> None:
        with mode:
            run()

    spans, _ = spans_of(labelled, lambda name: name.startswith(LABEL))
    by_index = {int(span.name.removeprefix(LABEL)): span for span in spans}
    return [_reading(by_index[index], seen) for index, seen in enumerate(mode.seen)]


def _reading(span: Span, seen: tuple[Signature, int]) -> OperatorReading:
    signature, fresh_bytes = seen
    inside = span.peak_bytes - span.start_bytes - fresh_bytes
    return OperatorReading(signature, fresh_bytes, max(0, inside))
