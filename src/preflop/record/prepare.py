"""From a subject to the parts of its loop, on fake tensors: model, batch, loss, optimizer.

The user's module is copied with its parameters and floating buffers replaced by fakes, so that
nothing about it changes and nothing of its size is allocated.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from preflop.errors import BadSubject, PreflopError
from preflop.precision import Precision
from preflop.record.fake import INTEGER_LIMIT_BYTES, FakeKernels
from preflop.record.loop import call_model
from preflop.record.recorder import Recorder
from preflop.subject import FAILURES, Subject, needs_batch, no_batch, users_error


def fake_model(subject: Subject, recorder: Recorder) -> nn.Module:
    """The subject's model with fake parameters; built or copied while nothing is recorded."""
    dtype = wanted_dtype(subject)
    if subject.module is not None:
        model = unwrap(subject.module)
        if has_lazy(model):
            with _disable_current_modes():
                model = copy.deepcopy(model)
            model = _learn_shapes(model, subject, recorder)
        model = copy_faked(model, recorder.kernels, dtype)
    else:
        with _building(recorder):
            model = unwrap(_built(subject))
        if has_lazy(model):
            with _disable_current_modes():
                model = unwrap(_built(subject))
            model = copy_faked(_learn_shapes(model, subject, recorder), recorder.kernels, dtype)
        fake_in_place(model, recorder.kernels, dtype)
    check_forward(model)
    check_batch(subject, model)
    return model


def copied(module: nn.Module) -> nn.Module:
    """A copy of a module with parameters that an optimizer takes.

    A scripted module's tensors are cloned in C++: with gradients on, as results of the originals; without, as
    tensors that want none.
    """
    with torch.no_grad():
        made = copy.deepcopy(module, _operators_of(module))
    for mine, theirs in zip(made.parameters(), module.parameters()):
        mine.requires_grad_(theirs.requires_grad)
    return made


def real_model(subject: Subject) -> nn.Module:
    """The subject's model on real tensors: built, or a deep copy of the user's."""
    try:
        made = copied(subject.module) if subject.module is not None else _built(subject)
    except PreflopError:
        raise
    except FAILURES as error:
        raise users_error("copying the model", error) from error
    model = unwrap(made)
    check_forward(model)
    check_batch(subject, model)
    elsewhere = {tensor.device.type for tensor in model.parameters()} - {"cpu"}
    if elsewhere:
        raise BadSubject(
            f"the model's parameters are on {', '.join(sorted(elsewhere))}, and a real step runs on the CPU."
            "\n  Give a module on the CPU, or a callable that builds one."
        )
    dtype = wanted_dtype(subject)
    return model if dtype is None else model.to(dtype)


def real_batch(subject: Subject) -> Any:
    """The batch, copied, its floats in the parameters' dtype where all of the model is 16-bit."""
    dtype = batch_dtype(subject.precision)

    def own(tensor: torch.Tensor) -> torch.Tensor:
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        mine = tensor.detach().to("cpu", wanted, copy=True)
        return mine.requires_grad_(tensor.requires_grad)

    return map_tensors(own, make_batch(subject))


def _built(subject: Subject) -> nn.Module:
    try:
        model = subject.make_model()
    except PreflopError:
        raise
    except FAILURES as error:
        raise users_error("building the model", error) from error
    if not isinstance(model, nn.Module):
        raise BadSubject(
            f"{subject.name} made {type(model).__name__}, not an nn.Module.\n"
            "  The factory must return the model."
        )
    return model


def has_lazy(model: nn.Module) -> bool:
    """Whether a lazy module has yet to see its first batch."""
    tensors = [*model.parameters(), *model.buffers()]
    return any(isinstance(tensor, nn.parameter.UninitializedTensorMixin) for tensor in tensors)


def _learn_shapes(model: nn.Module, subject: Subject, recorder: Recorder) -> nn.Module:
    """One real forward of `model`, a copy that nobody else holds: lazy modules take their shapes."""
    batch = make_batch(subject)
    if any(type(t) is FakeTensor or t.device.type == "meta" for t in tensors_of(batch)):
        raise BadSubject(
            "a lazy module learns its shapes from a batch with values, and this one has none.\n"
            "  Give a real batch, or run one forward of the model yourself first."
        )
    recorder.assumed("lazy modules took their shapes from one real forward of a copy.")
    try:
        with _disable_current_modes(), torch.no_grad():
            call_model(model, map_tensors(torch.Tensor.clone, batch))
    except FAILURES as error:
        raise users_error("the first forward, from which lazy modules take their shapes,", error) from error
    return model


def wanted_dtype(subject: Subject) -> torch.dtype | None:
    """What floating parameters are cast to; None leaves them as the model made them."""
    name = subject.precision.parameter_dtype
    if name == "float32" and not subject.casts_parameters:
        return None
    return getattr(torch, name)  # type: ignore[no-any-return]


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel or DataParallel: one rank's own step."""
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        return model.module  # type: ignore[no-any-return]
    return model


def check_forward(model: nn.Module) -> None:
    """A model must have a forward."""
    if isinstance(model, torch.jit.ScriptModule):
        return  # it was compiled from one
    if type(model).forward is nn.Module.forward and "forward" not in vars(model):
        raise BadSubject(
            f"{type(model).__name__} has no forward method.\n  Define forward(self, ...)."
        )


def check_batch(subject: Subject, model: nn.Module) -> None:
    """A model that reads something must be given a batch."""
    if subject.make_batch is not no_batch or isinstance(model, torch.jit.ScriptModule):
        return
    for parameter in inspect.signature(model.forward).parameters.values():
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not variadic:
            raise needs_batch()


# -- parameters -----------------------------------------------------------------------------------


def fake_of(
    tensor: torch.Tensor, kernels: FakeKernels, dtype: torch.dtype | None
) -> torch.Tensor:
    """A fake stand-in for a parameter or buffer: floats cast to `dtype`, same layout, a leaf."""
    target = tensor.dtype
    if dtype is not None and tensor.dtype.is_floating_point:
        target = dtype
    # Under the recorder's own mode the meta tensor would be a fake one, which torch 2.6 wraps no further.
    with _disable_current_modes():
        fake = kernels.empty(tuple(tensor.shape), tensor.stride(), target)
    if isinstance(tensor, nn.Parameter):
        fake.requires_grad_(tensor.requires_grad)
        fake._is_param = True
    return fake


def _stays_real(tensor: torch.Tensor) -> bool:
    """Integers and booleans keep their values where those exist and are small."""
    return (
        not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
        and tensor.numel() * tensor.itemsize <= INTEGER_LIMIT_BYTES
    )


def _real_twin(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "cpu":
        twin = tensor.detach().clone()
    else:
        twin = torch.zeros(tensor.shape, dtype=tensor.dtype)
    return nn.Parameter(twin, requires_grad=False) if isinstance(tensor, nn.Parameter) else twin


def _operators_of(model: nn.Module) -> dict[int, Any]:
    """Operators that modules hold as attributes, which cannot be copied and need not be: id -> itself."""
    kinds = (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch.library.CustomOpDef)
    held = [value for module in model.modules() for value in vars(module).values()]
    return {id(value): value for value in held if isinstance(value, kinds)}


def copy_faked(
    model: nn.Module, kernels: FakeKernels, dtype: torch.dtype | None
) -> nn.Module:
    """A deep copy whose parameters and floating buffers are fake. The original is only read."""
    memo: dict[int, Any] = _operators_of(model)
    for tensor in [*model.parameters(), *model.buffers()]:
        if id(tensor) not in memo:
            memo[id(tensor)] = (
                _real_twin(tensor) if _stays_real(tensor) else fake_of(tensor, kernels, dtype)
            )
    keep = list(memo.values())
    try:
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule) and id(module) not in memo:
                _copy_scripted(module, memo)
        copied = copy.deepcopy(model, memo)
    except FAILURES as error:
        raise users_error(
            "copying the model (Preflop never changes yours; give a callable that builds it instead)",
            error,
        ) from error
    del keep
    return copied


def _copy_scripted(module: nn.Module, memo: dict[int, Any]) -> None:
    """Enter a copy of a scripted module into `memo`: its tensors live in C++, where `copy` does not look."""
    with _disable_current_modes():
        copied = copy.deepcopy(module)
    for mine, theirs in zip(copied.modules(), module.modules()):
        for name, tensor in [
            *theirs.named_parameters(recurse=False), *theirs.named_buffers(recurse=False)
        ]:
            setattr(mine, name, memo[id(tensor)])
        memo[id(theirs)] = mine


def fake_in_place(
    model: nn.Module, kernels: FakeKernels, dtype: torch.dtype | None
) -> None:
    """Replace what a factory left real or in another dtype by fakes; ties stay ties."""
    swapped: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None or _as_wanted(tensor, dtype):
                    continue
                if id(tensor) not in swapped:
                    swapped[id(tensor)] = fake_of(tensor, kernels, dtype)
                table[name] = swapped[id(tensor)]
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()


def _as_wanted(tensor: torch.Tensor, dtype: torch.dtype | None) -> bool:
    if _stays_real(tensor) and tensor.device.type == "cpu":
        return True
    right = dtype is None or tensor.dtype == dtype or not tensor.dtype.is_floating_point
    return type(tensor) is FakeTensor and right


@contextlib.contextmanager
def _building(recorder: Recorder) -> Iterator[None]:
    """While a model is built: initialisers do nothing (some read values back, all cost time)."""
    names = [n for n in dir(nn.init) if callable(getattr(nn.init, n)) and n.endswith("_")]
    saved = {name: getattr(nn.init, name) for name in names if not name.startswith("__")}
    saved.pop("_calculate_fan_in_and_fan_out_", None)

    def leave(tensor: Any = None, *_: Any, **__: Any) -> Any:
        return tensor

    recording, recorder.recording = recorder.recording, False
    for name in saved:
        setattr(nn.init, name, leave)
    try:
        yield
    finally:
        for name, function in saved.items():
            setattr(nn.init, name, function)
        recorder.recording = recording


# -- batch ----------------------------------------------------------------------------------------


def fake_batch(subject: Subject, kernels: FakeKernels) -> Any:
    """The batch: floats fake, in the parameters' dtype where all of the model is 16-bit; integers real."""
    batch = make_batch(subject)
    cast = batch_dtype(subject.precision)

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if _stays_real(tensor):
            return _real_twin(tensor)
        twin = fake_of(tensor.detach(), kernels, cast)
        return twin.requires_grad_(tensor.requires_grad)

    return map_tensors(fake, batch)


def make_batch(subject: Subject) -> Any:
    """What the subject's batch callable makes."""
    try:
        batch = subject.make_batch()
    except PreflopError:
        raise
    except FAILURES as error:
        raise users_error("making the batch", error) from error
    map_leaves(_check_leaf, batch)
    if not list(tensors_of(batch)) and batch not in ((), {}, []):
        raise BadSubject(
            f"the batch is {type(batch).__name__} and holds no tensor.\n"
            "  Give a tensor, a tuple (positional) or a mapping (keyword) of tensors."
        )
    return batch


def _check_leaf(leaf: Any) -> Any:
    """Refuse arrays of other libraries, which torch's operators do not take, and nested tensors.

    Raises:
        BadSubject: the leaf is one; the message says how to make a tensor of it.
    """
    if isinstance(leaf, torch.Tensor):
        if leaf.is_nested:
            raise BadSubject(
                f"the batch holds a nested tensor ({leaf.dtype}): samples of several lengths in one tensor are not "
                "recorded.\n"
                "  Give a dense tensor, padded: torch.nested.to_padded_tensor(x, 0.0)."
            )
    elif hasattr(leaf, "__dlpack__"):  # the exchange of arrays: numpy, jax, cupy, tensorflow
        kind = f"{type(leaf).__module__.partition('.')[0]}.{type(leaf).__name__}"
        shape = f" of shape {tuple(leaf.shape)}" if hasattr(leaf, "shape") else ""
        made = "torch.from_numpy(x)" if kind == "numpy.ndarray" else "torch.from_dlpack(x)"
        raise BadSubject(
            f"the batch holds a {kind}{shape}; a step is recorded on torch's tensors.\n  Give {made}."
        )
    return leaf


def empty_assumption(batch: Any) -> str | None:
    """What is said of a batch of which some tensors, or all, are empty: a step of nothing is priced, too."""
    empty = [tensor for tensor in tensors_of(batch) if not tensor.numel()]
    if not empty:
        return None
    return f"of the batch, {batch_text(empty)} has no element: what reads it is priced as nothing"


def batch_dtype(precision: Precision) -> torch.dtype | None:
    """What floating inputs are cast to: an all-bf16 model cannot read fp32 images."""
    name = precision.parameter_dtype
    return None if name == "float32" else getattr(torch, name)  # type: ignore[no-any-return]


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """The same nested batch with every tensor changed; anything else is passed through.

    The same tensor twice stays one tensor.
    """
    seen: dict[int, torch.Tensor] = {}

    def leaf(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        if id(item) not in seen:
            seen[id(item)] = change(item)
        return seen[id(item)]

    return map_leaves(leaf, value)


def map_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """The same nested batch with everything changed that is no mapping, sequence or dataclass."""

    def walk(item: Any) -> Any:
        if isinstance(item, Mapping):
            return {key: walk(inner) for key, inner in item.items()}
        if isinstance(item, tuple) and hasattr(item, "_fields"):
            return type(item)(*(walk(inner) for inner in item))
        if isinstance(item, (list, tuple)):
            return type(item)(walk(inner) for inner in item)
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            changed = {f.name: walk(getattr(item, f.name)) for f in dataclasses.fields(item) if f.init}
            return dataclasses.replace(item, **changed)
        return change(item)

    return walk(value)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Every distinct tensor in a nested batch."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, value)
    yield from found


def batch_text(batch: Any) -> str:
    """The batch in words: "input_ids (2, 7) int64, labels (2, 7) int64"."""
    if isinstance(batch, torch.Tensor):
        return _tensor_text(batch)
    if isinstance(batch, Mapping):
        parts = [f"{k} {_tensor_text(v)}" for k, v in batch.items() if isinstance(v, torch.Tensor)]
    else:
        parts = [_tensor_text(tensor) for tensor in tensors_of(batch)]
    return ", ".join(parts)


def _tensor_text(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def count_samples(batch: Any) -> tuple[int | None, int | None]:
    """(samples, tokens) of a batch: its leading size; integers of shape (batch, sequence) are tokens."""
    tensors = list(tensors_of(batch))
    samples = next((tensor.shape[0] for tensor in tensors if tensor.ndim), None)
    names = batch if isinstance(batch, Mapping) else {}
    ids = names.get("input_ids")
    if ids is None:
        ids = next((t for t in tensors if t.dtype in (torch.int64, torch.int32) and t.ndim == 2), None)
        if any(t.is_floating_point() and t.ndim >= 3 for t in tensors):
            ids = None
    tokens = int(ids.numel()) if isinstance(ids, torch.Tensor) and ids.ndim == 2 else None
    return samples, tokens
