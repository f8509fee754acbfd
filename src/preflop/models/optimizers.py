"""Optimizers that torch does not have, in plain PyTorch: they train, and are recorded like any other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# Elements that share one absmax. Source: bitsandbytes, optim/optimizer.py, `Optimizer2State.init_state`
# (`blocksize = 256`; before version 0.44 it was 2048).
BLOCK_ELEMENTS = 256
# Smaller tensors keep fp32 states. Source: the same file, `min_8bit_size=4096`.
LEAST_8BIT_ELEMENTS = 4096
_EXPONENTS = 7
# Divides an all-zero block's zeros; no absmax of a moment that is not zero lies below it in fp32.
_TINY = torch.finfo(torch.float32).tiny


class _EachAlone(torch.optim.Optimizer):
    """Updates one parameter after the other."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError


class Lion(_EachAlone):
    """Sign of a moving average: one state per parameter, every element moves by the learning rate.

    Source: Chen et al. 2023 (arXiv 2302.06675), algorithm 2; operators as in google/automl,
    lion/lion_pytorch.py.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        beta1, beta2 = group["betas"]
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        update = state["exp_avg"] * beta1 + gradient * (1 - beta1)
        parameter.add_(update.sign_(), alpha=-group["lr"])
        state["exp_avg"].mul_(beta2).add_(gradient, alpha=1 - beta2)


class AdamW8bit(_EachAlone):
    """AdamW whose two moments are one byte per element, with one fp32 absmax per block of 256.

    Args:
        fused: one kernel per parameter that allocates nothing, as bitsandbytes' CUDA kernels are; else the
            same arithmetic written out, with fp32 temporaries of the parameter's size.

    Tensors of fewer than 4096 elements keep fp32 moments. The quantisation maps (256 fp32 values, signed
    for the first moment, positive for the second) are shared by all parameters.

    Source: Dettmers et al. 2022 (arXiv 2110.02861), sections 2 and 3; names and layouts of states as in
    bitsandbytes, optim/optimizer.py (`Optimizer2State.init_state`, block-wise).
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        fused: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._fused = fused
        self._maps: tuple[Tensor, Tensor] | None = None

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            self._make_state(parameter, state)
        state["step"] += 1
        numbers = (
            group["lr"], *group["betas"], group["eps"], group["weight_decay"], state["step"]
        )  # fmt: skip
        if "absmax1" not in state:
            update = torch.ops.preflop.adamw_32bit_ if self._fused else update_32bit
            update(parameter, gradient, state["state1"], state["state2"], *numbers)
            return
        update = torch.ops.preflop.adamw_8bit_ if self._fused else update_8bit
        update(
            parameter, gradient, state["state1"], state["state2"], state["absmax1"], state["absmax2"],
            state["qmap1"], state["qmap2"], *numbers,
        )  # fmt: skip

    def _make_state(self, parameter: nn.Parameter, state: dict[str, Any]) -> None:
        state["step"] = 0
        small = parameter.numel() < LEAST_8BIT_ELEMENTS
        for name in ("state1", "state2"):
            state[name] = torch.zeros_like(
                parameter,
                dtype=torch.float32 if small else torch.uint8,
                memory_format=torch.contiguous_format,
            )
        if small:
            return
        if self._maps is None:
            maps = (dynamic_map(signed=True), dynamic_map(signed=False))
            signed, positive = (torch.tensor(values, device=parameter.device) for values in maps)
            self._maps = signed, positive
        blocks = math.ceil(parameter.numel() / BLOCK_ELEMENTS)
        state["qmap1"], state["qmap2"] = self._maps
        for name in ("absmax1", "absmax2"):
            state[name] = parameter.new_zeros(blocks, dtype=torch.float32)


def dynamic_map(*, signed: bool) -> list[float]:
    """The 256 values, rising, that one byte stands for: fewer bits of fraction the smaller the value.

    Each power of ten from 1e-6 to 1 has twice as many values as the one below it, evenly spaced.

    >>> values = dynamic_map(signed=True)
    >>> len(values), values[-1], min(values) > -1, 0.0 in values
    (256, 1.0, True, True)

    Source: Dettmers 2016 (arXiv 1511.04561), dynamic tree quantisation; bitsandbytes, functional.py,
    `create_dynamic_map`.
    """
    values = [0.0, 1.0]
    for exponent in range(_EXPONENTS):
        count = 2**exponent if signed else 2 ** (exponent + 1)
        scale = 10.0 ** (exponent - _EXPONENTS + 1)
        for place in range(count):
            value = scale * (0.1 + 0.9 * (place + 0.5) / count)
            values.extend((value, -value) if signed else (value,))
    return sorted(values)


def update_32bit(
    parameter: Tensor, gradient: Tensor, state1: Tensor, state2: Tensor,
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int,
) -> None:  # fmt: skip
    """AdamW with fp32 moments, in place, whatever the parameter's dtype."""
    wide = gradient.float()
    state1.lerp_(wide, 1 - beta1)
    state2.mul_(beta2).addcmul_(wide, wide, value=1 - beta2)
    update = (state2.sqrt() / math.sqrt(1 - beta2**step)).add_(eps)
    torch.div(state1, update, out=update)
    parameter.mul_(1 - lr * weight_decay)
    parameter.add_(update.to(parameter.dtype), alpha=-lr / (1 - beta1**step))


def update_8bit(
    parameter: Tensor, gradient: Tensor, state1: Tensor, state2: Tensor, absmax1: Tensor, absmax2: Tensor,
    qmap1: Tensor, qmap2: Tensor,
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int,
) -> None:  # fmt: skip
    """AdamW whose moments are read from bytes, updated in fp32 and written back as bytes, in place."""
    first, second = _dequantised(state1, absmax1, qmap1), _dequantised(state2, absmax2, qmap2)
    update_32bit(parameter, gradient, first, second, lr, beta1, beta2, eps, weight_decay, step)
    _quantise(first, state1, absmax1, qmap1)
    _quantise(second, state2, absmax2, qmap2)


def _dequantised(codes: Tensor, absmax: Tensor, values: Tensor) -> Tensor:
    flat = values.index_select(0, codes.view(-1).int())
    scale = absmax[:, None].expand(-1, BLOCK_ELEMENTS).reshape(-1)[: flat.numel()]
    return flat.mul_(scale).view(codes.shape)


def _quantise(moments: Tensor, codes: Tensor, absmax: Tensor, values: Tensor) -> None:
    """Write the nearest codes of the moments, each block divided by its largest magnitude."""
    count = moments.numel()
    blocks = functional.pad(moments.view(-1), (0, -count % BLOCK_ELEMENTS)).view(-1, BLOCK_ELEMENTS)
    absmax.copy_(blocks.abs().amax(1))
    blocks.div_(absmax.clamp(min=_TINY)[:, None])
    between = (values[1:] + values[:-1]) / 2
    nearest = torch.bucketize(blocks.view(-1)[:count], between, out_int32=True)
    codes.view(-1).copy_(nearest)


_NUMBERS = "float lr, float beta1, float beta2, float eps, float weight_decay, int step"
_STATES = "Tensor(a!) parameter, Tensor gradient, Tensor(b!) state1, Tensor(c!) state2"


def _define(name: str, arguments: str, function: Callable[..., None]) -> None:
    """Make the update one operator, as a fused kernel is one launch."""
    torch.library.define(f"preflop::{name}", f"({arguments}, {_NUMBERS}) -> ()")
    torch.library.impl(f"preflop::{name}", "default", function)
    torch.library.register_fake(f"preflop::{name}", lambda *args: None)


_define("adamw_32bit_", _STATES, update_32bit)
_define(
    "adamw_8bit_",
    f"{_STATES}, Tensor(d!) absmax1, Tensor(e!) absmax2, Tensor qmap1, Tensor qmap2",
    update_8bit,
)


class MuonWithAdamW(torch.optim.Optimizer):
    """torch.optim.Muon for hidden matrices, torch.optim.AdamW for all other parameters.

    Args:
        hidden: matrices inside the blocks (`is_hidden_matrix`).
        others: embeddings, the head, norms, biases, and what is no matrix.
        foreach: how AdamW runs; Muon has one form only.

    Source: the documentation of torch.optim.Muon; Jordan 2024, https://kellerjordan.github.io/posts/muon/
    ("embedding parameters, the final fully connected layer, and scalar and vector parameters by AdamW").
    """

    def __init__(
        self, hidden: Iterable[nn.Parameter], others: Iterable[nn.Parameter], *, foreach: bool = False
    ) -> None:
        parts = (list(hidden), list(others))
        inner: list[torch.optim.Optimizer] = []
        if parts[0]:
            inner.append(torch.optim.Muon(parts[0]))
        if parts[1]:
            inner.append(torch.optim.AdamW(parts[1], foreach=foreach))
        super().__init__([group for one in inner for group in one.param_groups], {})
        self._inner = inner

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        del closure
        for one in self._inner:
            one.state = self.state
            one.step()


def is_hidden_matrix(name: str, shape: tuple[int, ...], holder: str, names: Iterable[str]) -> bool:
    """Whether Muon updates this parameter of a model.

    Hidden matrices are those of numbered blocks (members of a list that hold modules). A model without
    blocks has all its matrices hidden but the last, its head. An embedding's matrix never is one.

    Args:
        name: dotted.
        holder: class name of the module that holds it.
        names: of the model's matrices that no embedding holds, in the model's order.

    >>> names = ["blocks.0.up.weight", "blocks.0.down.weight", "head.weight"]
    >>> [is_hidden_matrix(name, (8, 8), "Linear", names) for name in names]
    [True, True, False]
    >>> [is_hidden_matrix(name, (8, 8), "Linear", ["0.weight", "2.weight"]) for name in ("0.weight", "2.weight")]
    [True, False]
    """
    if len(shape) != 2 or "embedding" in holder.lower():
        return False
    known = list(names)
    if any(_in_block(one) for one in known):
        return _in_block(name)
    return name != known[-1]


def _in_block(name: str) -> bool:
    """Whether a number in the path is followed by a module and a parameter."""
    parts = name.split(".")
    return any(part.isdigit() for part in parts[:-2])
