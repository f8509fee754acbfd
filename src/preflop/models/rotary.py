"""Rotary position embeddings: tables made once per forward, outside the blocks, and their use."""

import math

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from preflop.models.catalog import ModelFacts, RopeScaling


def rotary_dims(facts: ModelFacts) -> int:
    """How many of a head's dimensions are rotated."""
    return int(facts.needed("head_dim") * facts.rotary_fraction)


def _stretched(
    frequency: Float[Tensor, " half"],  # type: ignore[name-defined]
    scaling: RopeScaling,
) -> Float[Tensor, " half"]:  # type: ignore[name-defined]
    """Frequencies with the slow ones divided by `factor` and a smooth passage between.

    Source: `_compute_llama3_parameters` of transformers, after github.com/meta-llama/llama-models.
    """
    turns = scaling.original_max_positions * frequency / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    fast_share = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequency * (fast_share + (1.0 - fast_share) / scaling.factor)


def rotary_tables(
    facts: ModelFacts, sequence: int, *, dtype: torch.dtype, device: torch.device
) -> tuple[Float[Tensor, "sequence rotary"], Float[Tensor, "sequence rotary"]]:
    """Cosines and sines of position x frequency, computed in fp32, given in `dtype`.

    Every block reads the same two tables. They hold no gradient and depend on no weight.

    Source: Su et al. 2021, arXiv:2104.09864, with the two halves of a head paired (GPT-NeoX, Llama).
    """
    theta, dims = facts.needed("rope_theta"), rotary_dims(facts)
    exponent = torch.arange(0, dims, 2, dtype=torch.float32, device=device) / dims
    frequency = 1.0 / (theta**exponent)
    if facts.rope_scaling is not None:
        frequency = _stretched(frequency, facts.rope_scaling)
    position = torch.arange(sequence, dtype=torch.float32, device=device)
    angle = rearrange(position, "sequence -> sequence 1") * frequency
    both_halves = torch.cat((angle, angle), dim=-1)
    return both_halves.cos().to(dtype), both_halves.sin().to(dtype)


def _rotate_half(
    tensor: Float[Tensor, "batch heads sequence rotary"],
) -> Float[Tensor, "batch heads sequence rotary"]:
    half = tensor.shape[-1] // 2
    first, second = tensor[..., :half], tensor[..., half:]
    return torch.cat((-second, first), dim=-1)


def rotate(
    tensor: Float[Tensor, "batch heads sequence head"],
    cos: Float[Tensor, "sequence rotary"],
    sin: Float[Tensor, "sequence rotary"],
) -> Float[Tensor, "batch heads sequence head"]:
    """Queries or keys turned by their position. Dimensions past the tables' width pass unchanged."""
    dims = cos.shape[-1]
    if dims == tensor.shape[-1]:
        return tensor * cos + _rotate_half(tensor) * sin
    turned, kept = tensor[..., :dims], tensor[..., dims:]
    turned = turned * cos + _rotate_half(turned) * sin
    return torch.cat((turned, kept), dim=-1)
