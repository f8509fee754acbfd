"""Mixed-precision recipes: bytes per parameter of weights, gradients, master copy and AdamW's states.

12, 14, 16, 18 and 20 are all claimed in public for "mixed precision". Each is right for one recipe; the
difference is who keeps what in which format, and whether a copy that lives for a moment is counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from preflop.errors import PreflopError, unknown_name


class UnknownRecipe(PreflopError):
    """No recipe of that name."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What one recipe keeps per parameter, in bytes; two states are AdamW's."""

    name: str
    weight: int
    gradient: int
    master: int
    """An fp32 copy of the weight, which the optimizer updates."""
    states: int
    transient: int
    """Alive for a part of the step only."""
    transient_when: str
    precision: str | None
    """`preflop account --precision` that records it; None: torch's own loop cannot."""
    used: str
    """Where it is used, and who says so."""

    @property
    def bytes(self) -> int:
        """Bytes per parameter that stay through the step (gradients from backward to the update).

        >>> find_recipe("bf16-master").bytes
        16
        """
        return self.weight + self.gradient + self.master + self.states

    @property
    def peak_bytes(self) -> int:
        """The same with what lives for a part of the step.

        >>> find_recipe("bf16-master-cast").peak_bytes
        20
        """
        return self.bytes + self.transient


def _recipe(
    name: str, parts: tuple[int, int, int, int], used: str, precision: str | None = None,
    transient: int = 0, when: str = "",
) -> Recipe:  # fmt: skip
    return Recipe(name, *parts, transient, when, precision, used)


RECIPES: tuple[Recipe, ...] = (
    _recipe("fp32", (4, 4, 0, 8), "torch's default; the reference for all others", "fp32"),
    _recipe(
        "autocast",
        (4, 4, 0, 8),
        "torch.autocast (Hugging Face Trainer's bf16=True, Lightning's bf16-mixed, nanoGPT)",
        "bf16-mixed",
        2,
        "half-precision copies of the weights, from their first use in forward to the end of autocast",
    ),
    _recipe(
        "bf16",
        (2, 2, 0, 4),
        "model.bfloat16() with torch.optim.AdamW, whose states are bf16 too; small updates are lost",
        "bf16",
    ),
    _recipe(
        "bf16-fp32-states",
        (2, 2, 0, 8),
        "optimizers with fp32 states over bf16 weights (with stochastic rounding, as in torchao)",
        "bf16-fp32-states",
    ),
    _recipe(
        "bf16-master",
        (2, 2, 4, 8),
        "ZeRO's 2 + 2 + 12 (Rajbhandari et al. 2020, section 3.1): an fp32 master copy over bf16 weights",
        "bf16-master",
    ),
    _recipe(
        "bf16-master-fp32-gradients",
        (2, 4, 4, 8),
        "Megatron-LM with bf16 and gradients accumulated in fp32 (docs: distributed optimizer, 18 bytes)",
    ),
    _recipe(
        "bf16-master-cast",
        (2, 2, 4, 8),
        "optimizers that cast every half gradient to fp32 first: Megatron-LM with fp16 (docs: 20 bytes)",
        None,
        4,
        "fp32 copies of all gradients inside the optimizer's step",
    ),
)


def find_recipe(name: str) -> Recipe:
    """The recipe of that name.

    Raises:
        UnknownRecipe: there is none; the message names the nearest.
    """
    known = {recipe.name: recipe for recipe in RECIPES}
    if name not in known:
        raise unknown_name(UnknownRecipe, "recipe", name, known, ", ".join(known))
    return known[name]
