"""What recording must leave alone: everything of a module that a user could see, and the random states."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import torch
from torch import nn

_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_state_dict_hooks", "_load_state_dict_pre_hooks",
)


def state_of(model: nn.Module) -> dict[str, Any]:
    """Everything to compare: name of a thing -> its value now."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        found[f"{path}: class"] = type(module)
        found[f"{path}: training"] = module.training
        for name in _HOOKS:
            found[f"{path}: {name}"] = tuple(getattr(module, name, ()))
        found[f"{path}: attributes"] = {
            name: _plain(value) for name, value in vars(module).items() if name not in _HOOKS
        }
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            found[f"{kind} {name}"] = _tensor(tensor)
    found["state_dict keys"] = tuple(model.state_dict())
    found["random state of torch"] = _digest(torch.get_rng_state())
    found["random state of Python"] = random.getstate()
    found["random state of numpy"] = _numpy_state()
    found["default dtype"] = torch.get_default_dtype()
    found["grad enabled"] = torch.is_grad_enabled()
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of what is not as it was, of what is new and of what is gone."""
    return [name for name in {**before, **after} if before.get(name) != after.get(name)]


def _plain(value: Any) -> Any:
    """Numbers and words by value, the rest by identity: what an attribute that was left alone keeps."""
    return value if isinstance(value, (int, float, str, bool, type(None))) else id(value)


def _tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
        return (id(tensor), type(tensor))
    return (
        id(tensor), tensor.data_ptr(), tensor._version, tuple(tensor.shape), tensor.stride(), tensor.dtype,
        tensor.requires_grad, tensor.grad is None, len(getattr(tensor, "_backward_hooks", None) or ()),
        _digest(tensor),
    )


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()


def _numpy_state() -> str:
    try:
        import numpy
    except ImportError:
        return ""
    return repr(numpy.random.get_state(legacy=False)["state"])
