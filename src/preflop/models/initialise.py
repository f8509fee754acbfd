"""First values of a model's weights, as its paper or reference implementation draws them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from preflop.models.catalog import ModelFacts
from preflop.models.layers import RMSNorm


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Gives every weight of a model made by `build` its first value, from its own random generator.

    Equal seeds give equal weights on one kind of device; the global random state is not touched.
    Matrices: normal with the family's standard deviation, or by fan-out where it has none (ResNet). GPT-2's
    projections into the residual stream: divided by sqrt(2 x layers). Biases 0, norms the identity.

    Source: Radford et al. 2019, section 2.3; `initializer_range` of each config.json; He et al. 2015,
    arXiv:1502.01852.
    """
    facts: ModelFacts = model.facts
    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(seed)
    in_norms = _reset_norms(model)
    for name, parameter in model.named_parameters():
        if name in in_norms:
            continue
        if name.endswith("bias"):
            parameter.zero_()
        else:
            std = _std(model, facts, name, parameter)
            parameter.normal_(0.0, std, generator=generator)


def _reset_norms(model: nn.Module) -> set[str]:
    """Makes each norm the identity; returns the names of their parameters."""
    done = set()
    for path, module in model.named_modules():
        if isinstance(module, RMSNorm):
            module.weight.fill_(0.0 if module.unit_offset else 1.0)
        elif isinstance(module, (nn.LayerNorm, nn.BatchNorm2d)):
            module.reset_parameters()
        else:
            continue
        done |= {f"{path}.{name}" for name, _ in module.named_parameters(recurse=False)}
    return done


def _std(model: nn.Module, facts: ModelFacts, name: str, parameter: Tensor) -> float:
    """Standard deviation of one weight's first values."""
    if facts.initializer_std is None:
        fan_out = parameter.shape[0] * math.prod(parameter.shape[2:])
        return math.sqrt(2.0 / fan_out)
    if name.endswith(tuple(model.residual_projections)):
        return facts.initializer_std / math.sqrt(2 * facts.layers)
    return facts.initializer_std
