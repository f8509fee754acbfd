"""The recorded step: the loop whose cost is priced, and that `preflop verify` runs for real.

The same function runs on fake tensors (recording) and on real ones (measuring), so both sides hold
the same variables for the same time.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from preflop.errors import BadSubject

Observer = Callable[[str, int], None]
"""Called at each moment of the loop (see `tape.events.Mark`) with its name and the microbatch."""


def train_step(
    model: nn.Module,
    batch: Any,
    loss: Callable[[Any], torch.Tensor],
    optimizer: torch.optim.Optimizer | None,
    *,
    autocast_dtype: torch.dtype | None,
    scaler: torch.amp.GradScaler | None,
    microbatches: int,
    keep_output: bool,
    observe: Observer,
) -> None:
    """One optimizer step, exactly the contract's loop.

    Args:
        batch: what one forward sees.
        autocast_dtype: None for no autocast.
        keep_output: keep `output` to the end of its microbatch, as loops that log it do.
    """
    observe("step", 0)
    for microbatch in range(microbatches):
        observe("microbatch", microbatch)
        with _autocast(autocast_dtype):
            output = call_model(model, batch)
            value = loss(output)
        trains = trainable(model, value)
        if trains:
            check_loss(value)
        if not keep_output:
            del output
        observe("forward_end", microbatch)
        if trains:
            backward(value, microbatches, scaler)
        del value
        if keep_output:
            del output
        observe("backward_end", microbatch)
    if optimizer is not None:
        if scaler is not None:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        observe("optimizer_end", microbatches - 1)
        optimizer.zero_grad(set_to_none=True)
    else:
        model.zero_grad(set_to_none=True)
    gc.collect()
    observe("step_end", microbatches - 1)


def trainable(model: nn.Module, value: Any) -> bool:
    """Whether there is a backward: something in the model, or the loss itself, wants a gradient.

    A model without parameters, or one that is frozen as a whole, has forward only.
    """
    if isinstance(value, torch.Tensor) and value.requires_grad:
        return True
    return any(parameter.requires_grad for parameter in model.parameters())


def backward(value: torch.Tensor, microbatches: int, scaler: torch.amp.GradScaler | None) -> None:
    """Backward of one microbatch's share of the loss."""
    share = value / microbatches
    if scaler is not None:
        share = scaler.scale(share)
    share.backward()


def _autocast(dtype: torch.dtype | None) -> Any:
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)


def call_model(model: nn.Module, batch: Any) -> Any:
    """Tensor: one argument; tuple or list: positional; mapping: keywords."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


def default_loss(output: Any) -> torch.Tensor:
    """`.loss` of the output, the output if it is a scalar, the one scalar of a tuple (nanoGPT's
    `(logits, loss)`), else the mean of its first tensor in fp32."""
    loss = _given_loss(output)
    if loss is not None:
        return loss
    tensor = first_tensor(output)
    if tensor is None:
        raise BadSubject(
            f"the model returned {type(output).__name__}, from which no loss can be taken.\n"
            "  Give loss=, a function from the output to a scalar."
        )
    if tensor.numel() == 1 and tensor.ndim == 0:
        return tensor
    return tensor.float().mean()


def loss_assumption(output: Any) -> str | None:
    """What `default_loss` assumes about an output, where it had to choose."""
    if _given_loss(output) is not None or isinstance(output, torch.Tensor):
        return None
    return (
        f"the model returned {type(output).__name__} without a loss: the mean of its first tensor is taken, "
        "and what the others would add to backward is not priced; give loss= (--loss FILE:function)"
    )


def _given_loss(output: Any) -> torch.Tensor | None:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    if not isinstance(output, (tuple, list)):
        return None
    scalars = [x for x in output if isinstance(x, torch.Tensor) and x.ndim == 0 and x.requires_grad]
    return scalars[0] if len(scalars) == 1 else None


def first_tensor(output: Any) -> torch.Tensor | None:
    """The first floating tensor in an output (logits, last hidden state)."""
    if isinstance(output, torch.Tensor):
        return output if output.is_floating_point() or output.is_complex() else None
    items: Any = ()
    if isinstance(output, Mapping):
        items = output.values()
    elif isinstance(output, (tuple, list)):
        items = output
    elif dataclasses.is_dataclass(output) and hasattr(output, "logits"):
        items = (output.logits,)
    for item in items:
        found = first_tensor(item)
        if found is not None:
            return found
    return None


def check_loss(value: Any) -> None:
    """A loss must be a scalar that depends on a parameter."""
    if not isinstance(value, torch.Tensor):
        raise BadSubject(
            f"the loss is {type(value).__name__}, not a tensor.\n"
            "  Return a scalar tensor from loss=."
        )
    if value.numel() != 1:
        raise BadSubject(
            f"the loss has shape {tuple(value.shape)}, backward needs one number.\n"
            "  Reduce it, for example with .mean()."
        )
    if not value.requires_grad:
        raise BadSubject(
            "the loss does not depend on anything that needs a gradient.\n"
            "  Check that parameters have requires_grad=True and that forward is not under no_grad."
        )
