"""A stack of equal blocks, of which a few are recorded and the rest replayed (`transforms.depth`)."""

from __future__ import annotations

from dataclasses import dataclass

from preflop.tape.events import Tape

RECORDED = 4
"""Instances that are recorded: first, checked, template, last."""


class Refused(Exception):
    """The fold does not hold; the text says why."""


@dataclass(frozen=True, slots=True)
class Stack:
    """Where the folded blocks stand in the model."""

    path: str
    """Dotted path of the container: "blocks", "model.layers"."""
    first: int
    """Number of the first folded block in the container (those before it differ)."""
    period: int
    """Blocks per instance (2 where two kinds alternate)."""
    instances: int
    """Instances the real model has."""

    def locate(self, module: str) -> tuple[int, int, str] | None:
        """(instance, block within it, rest of the path) of a module or parameter path, else None."""
        prefix = f"{self.path}." if self.path else ""
        if not module.startswith(prefix):
            return None
        head, _, rest = module[len(prefix) :].partition(".")
        if not head.isdigit():
            return None
        number = int(head) - self.first
        if not 0 <= number < self.period * RECORDED:
            return None
        return number // self.period, number % self.period, rest

    def path_of(self, instance: int, block: int, rest: str) -> str:
        """The inverse of `locate`, for any instance."""
        prefix = f"{self.path}." if self.path else ""
        number = self.first + instance * self.period + block
        return f"{prefix}{number}" + (f".{rest}" if rest else "")


@dataclass(frozen=True, slots=True)
class CutTape:
    """A tape of the model with its stacks cut down, and what was cut."""

    tape: Tape
    stacks: tuple[Stack, ...]
    reasons: tuple[str, ...] = ()
    """Why a stack was left whole."""
