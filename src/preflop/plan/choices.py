"""Many choices of one model: batch, sequence, accumulation and recomputation, each in arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from preflop.axes import SEQ
from preflop.hardware.device import Device
from preflop.plan.evaluate import Evaluator
from preflop.plan.outcome import Outcome
from preflop.quantity import whole
from preflop.tape.sizes import NotPolynomial, ParametricTape


class Choices:
    """One model on one kind of device, ready to be priced at thousands of choices."""

    def __init__(
        self, tapes: Mapping[str, Sequence[ParametricTape]], *, device: Device | None = None
    ) -> None:
        """Takes, for each recomputation mode, the parametric tapes that together hold every size.

        Args:
            device: whose rates give the time where `evaluate` names no other.
        """
        self._device = device
        self._evaluators = {mode: [Evaluator(tape) for tape in those] for mode, those in tapes.items()}

    @property
    def recompute_modes(self) -> tuple[str, ...]:
        """The recomputation modes there are tapes for."""
        return tuple(self._evaluators)

    def holds(self, batch: int, seq: int | None = None, *, recompute: str = "none", **lengths: int) -> bool:
        """Whether the size was verified. Lengths that are no sequence's are given by the names of their axes."""
        batch, named = _sizes(batch, seq, lengths)
        return any(e.holds(batch, **named) for e in self._evaluators.get(recompute, ()))

    def evaluate(
        self,
        batch: int,
        seq: int | None = None,
        *,
        microbatches: int = 1,
        recompute: str = "none",
        device: Device | None = None,
        **lengths: int,
    ) -> Outcome:
        """What one step costs, equal to the account of the recorded one to the byte and the FLOP.

        Args:
            batch: what one forward sees; `microbatches` of them make a step.
            device: whose rates give the time; None: those of the device that the choices were made for,
                and no time where that is the CPU.
            lengths: of axes that are no sequence, by name: `evaluate(8, source=512, target=128)`.

        Raises:
            BadNumber: a size or a number of microbatches that is no whole number of at least 1.
            NotPolynomial: the size, or the mode, is none that a tape was verified for.
        """
        batch, named = _sizes(batch, seq, lengths)
        microbatches = whole("microbatches", microbatches)
        device = device or self._device
        for evaluator in self._evaluators.get(recompute, ()):
            if evaluator.holds(batch, **named):
                return evaluator.evaluate(batch, **named, microbatches=microbatches, device=device)
        size = ParametricTape.asked(batch, **named).replace("seq ", "sequence ")
        if recompute not in self._evaluators:
            raise NotPolynomial(
                f"these choices were not made for recompute {recompute!r}.\n"
                f"  They are for: {', '.join(map(repr, self._evaluators))}; give preflop.choices(recompute=...) all."
            )
        held = "; ".join(dict.fromkeys(evaluator.extent for evaluator in self._evaluators[recompute]))
        raise NotPolynomial(
            f"no tape of recompute {recompute!r} was verified for {size}.\n"
            f"  Verified: {held}. `preflop.account` records any other size that the model can run."
        )


def _sizes(batch: int, seq: int | None, lengths: Mapping[str, int]) -> tuple[int, dict[str, int]]:
    given = lengths if seq is None else {SEQ: seq, **lengths}
    return whole("batch", batch), {name: whole(name, length) for name, length in given.items()}
