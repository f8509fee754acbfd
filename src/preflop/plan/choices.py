"""Many choices of one model: batch, sequence, accumulation and recomputation, each in arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from preflop.hardware.device import Device
from preflop.plan.evaluate import Evaluator
from preflop.plan.outcome import Outcome
from preflop.tape.sizes import NotPolynomial, ParametricTape


class Choices:
    """One model on one kind of device, ready to be priced at thousands of choices."""

    def __init__(self, tapes: Mapping[str, Sequence[ParametricTape]]) -> None:
        """Takes, for each recomputation mode, the parametric tapes that together hold every size."""
        self._evaluators = {mode: [Evaluator(tape) for tape in those] for mode, those in tapes.items()}

    @property
    def recompute_modes(self) -> tuple[str, ...]:
        """The recomputation modes there are tapes for."""
        return tuple(self._evaluators)

    def holds(self, batch: int, seq: int | None = None, *, recompute: str = "none") -> bool:
        """Whether the size was verified."""
        return any(e.holds(batch, seq) for e in self._evaluators.get(recompute, ()))

    def evaluate(
        self,
        batch: int,
        seq: int | None = None,
        *,
        microbatches: int = 1,
        recompute: str = "none",
        device: Device | None = None,
    ) -> Outcome:
        """What one step costs, equal to the account of the recorded one to the byte and the FLOP.

        Args:
            batch: what one forward sees; `microbatches` of them make a step.
            device: whose rates give the time; None: no time.

        Raises:
            NotPolynomial: the size, or the mode, is none that a tape was verified for.
        """
        for evaluator in self._evaluators.get(recompute, ()):
            if evaluator.holds(batch, seq):
                return evaluator.evaluate(batch, seq, microbatches=microbatches, device=device)
        size = f"batch {batch}" + ("" if seq is None else f", sequence {seq}")
        raise NotPolynomial(f"no tape of recompute {recompute!r} was verified for {size}")
