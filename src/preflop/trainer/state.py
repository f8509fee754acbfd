"""Model and optimizer as flat tensors by name, and back: what a checkpoint's tensors are."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import nn

from preflop.errors import BadFile
from preflop.trainer.processes import unwrapped


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every parameter, buffer and optimizer state, by name. A tied weight once."""
    found = dict(_model_tensors(model))
    named = dict(unwrapped(model).named_parameters())
    if not set(optimizer.state) <= set(named.values()):
        raise RuntimeError("the optimizer holds states of parameters that the model does not name")
    for name, parameter in named.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                found[f"optimizer/{key}/{name}"] = value
            elif value is not None:
                raise BadFile(
                    f"{type(optimizer).__name__} keeps {key} as {type(value).__name__}, not as a tensor."
                )
    return found


def _model_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    inner = unwrapped(model)
    for name, parameter in inner.named_parameters():
        yield f"model/{name}", parameter.detach()
    for name, buffer in inner.named_buffers():
        yield f"model/{name}", buffer


def room_for(
    saved: Mapping[str, tuple[torch.Size, torch.dtype]], model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """Tensors to load into: the model's own, and new ones for the optimizer's states, sharded alike.

    Raises:
        BadFile: a tensor of the model is missing, or has another shape or dtype.
    """
    into = dict(_model_tensors(model))
    for name, tensor in into.items():
        wanted = (tensor.shape, tensor.dtype)
        if saved.get(name) != wanted:
            there = "none" if name not in saved else f"{tuple(saved[name][0])} {saved[name][1]}"
            raise BadFile(
                f"the checkpoint is of another model: {name.removeprefix('model/')} is {tuple(wanted[0])} "
                f"{wanted[1]} here and {there} there.\n  Resume with the model that was trained, or start "
                "anew with another --out."
            )
    parameters = dict(unwrapped(model).named_parameters())
    for name, (shape, dtype) in saved.items():
        kind, _, rest = name.partition("/")
        if kind == "optimizer":
            key, _, parameter_name = rest.partition("/")
            if parameter_name not in parameters:
                raise BadFile(
                    f"the checkpoint has an optimizer state of {parameter_name}, which no model here has."
                )
            into[name] = _like(parameters[parameter_name], key, shape, dtype, optimizer)
    return into


def _like(
    parameter: nn.Parameter, key: str, shape: torch.Size, dtype: torch.dtype, optimizer: torch.optim.Optimizer
) -> torch.Tensor:
    """An empty state, on the device where the optimizer keeps it: step counters of plain ones on the CPU."""
    if shape == parameter.shape:
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    group = next(one for one in optimizer.param_groups if any(each is parameter for each in one["params"]))
    on_cpu = key == "step" and not (group.get("fused") or group.get("capturable"))
    return torch.zeros(shape, dtype=dtype, device="cpu" if on_cpu else parameter.device)


def set_optimizer_states(
    loaded: Mapping[str, torch.Tensor], model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Give the optimizer its states back, by parameter name, dtypes as they were saved."""
    parameters = dict(unwrapped(model).named_parameters())
    optimizer.state.clear()
    for name, tensor in loaded.items():
        kind, _, rest = name.partition("/")
        if kind == "optimizer":
            key, _, parameter_name = rest.partition("/")
            optimizer.state[parameters[parameter_name]][key] = tensor


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor: all of it, unless it is sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of parameters, buffers and states in this process: what a step finds, each storage once."""
    storages = [local_part(tensor).untyped_storage() for tensor in tensors_of(model, optimizer).values()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def not_finite(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """The first tensor that holds a NaN or an infinity; None where all are healthy."""
    for name, tensor in tensors.items():
        local = local_part(tensor)
        if local.is_floating_point() and not bool(torch.isfinite(local).all()):
            return name.partition("/")[2]
    return None


def model_fingerprint(model: nn.Module) -> str:
    """Names the model's structure: equal for equal parameter names, shapes and dtypes."""
    rows = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in _model_tensors(model)]
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def versions(preflop_version: str) -> dict[str, str]:
    """What made the checkpoint."""
    return {
        "preflop": preflop_version,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "cuda": str(torch.version.cuda),
    }
