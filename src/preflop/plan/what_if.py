"""What if: one knob at a time from a given run, each change priced whole, and what to change first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from preflop.account import Priced
from preflop.errors import BadNumber, PreflopError
from preflop.hardware.allocator_settings import EXPANDABLE, AllocatorSettings
from preflop.optimizers import IN_BACKWARD, OptimizerSpec, find_optimizer
from preflop.plan.choice import Choice, Route, route_of
from preflop.plan.outcome import Outcome, outcome_of
from preflop.precision import PRECISIONS
from preflop.timing.this import device_with_figures
from preflop.units import bytes_text

RECOMPUTE_MODES = ("none", "selective", "block")
# Updates that people choose between; those after AdamW's are other algorithms with fewer or smaller states.
OPTIMIZERS_TRIED = (
    "adamw", "adamw-fused", "adamw-loop", "adamw-8bit", "adafactor", "lion", "muon", "momentum", "sgd",
)  # fmt: skip
# One of each kind that is rented or owned today, by memory.
DEVICES_TRIED = ("rtx-4090", "l40s", "a100-80gb", "h100-sxm", "h200-sxm", "b200-sxm")
SPLIT = 2
# Parts of a chunked loss: with them the logits of a chunk are small beside what a block keeps.
LOSS_CHUNKS = 8

# A gain smaller than this is within what the bounds of a time say; it is no advice.
_WORTH = 0.02


class Keeps(IntEnum):
    """What of the training a change leaves as it was."""

    MATHEMATICS = 0
    """The same numbers up to the order of sums: accumulation, recomputation, kernels, devices."""
    WEIGHTS = 1
    """Weights in fp32; activations rounded otherwise."""
    ALGORITHM = 2
    """Weights rounded otherwise."""
    NOTHING = 3
    """Another update: to be tuned anew."""


@dataclass(frozen=True, slots=True)
class Row:
    """One change and what the step then costs."""

    knob: str
    """batch, recompute, loss, offload, precision, optimizer, allocator or device; "" for the given run."""
    words: str
    choice: Choice
    route: Route
    keeps: Keeps
    outcome: Outcome | None
    """None where the choice cannot be run."""
    refused: str = ""
    """Why it cannot."""


@dataclass(frozen=True, slots=True)
class Change:
    """Relative changes from the given run: -0.5 is half of it. None where a figure is not known."""

    peak: float | None
    flops: float | None
    moved: float | None
    time: float | None
    """Of the time per token (or sample)."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The given run, one row for each change, and what to change first."""

    given: Row
    rows: tuple[Row, ...]
    advice: str

    def change(self, row: Row) -> Change:
        """How a row differs from the given run."""
        return change(self.given.outcome, row.outcome)

    def untimed(self) -> list[str]:
        """Why rows have no time, in words: their device has no peak for their matmuls."""
        alike: dict[str, list[str]] = {}
        for row in (self.given, *self.rows):
            if row.outcome is not None and row.outcome.no_peak:
                device = device_with_figures(row.choice.device).name
                reason = f"{device} has no dense peak for {', '.join(row.outcome.no_peak)} to time its matmuls by"
                alike.setdefault(reason, []).append(row.words)
        return [f"no time ({_few(words)}): {reason}" for reason, words in alike.items()]


def _few(words: Sequence[str], most: int = 3) -> str:
    """The first of them, and how many more.

    >>> _few(["bf16", "tf32", "sgd", "lion", "adafactor"])
    'bf16, tf32, sgd and 2 more'
    """
    more = len(words) - most
    return ", ".join(words[:most]) + (f" and {more} more" if more > 0 else "")


def change(given: Outcome | None, other: Outcome | None) -> Change:
    """Relative changes from one outcome to another."""
    if given is None or other is None:
        return Change(None, None, None, None)
    return Change(
        _relative(given.peak_bytes, other.peak_bytes),
        _relative(_per_unit(given.flops_hardware, given), _per_unit(other.flops_hardware, other)),
        _relative(_per_unit(given.moved_bytes, given), _per_unit(other.moved_bytes, other)),
        # An expected time and a lower bound are not compared.
        _relative(given.per_unit_s, other.per_unit_s)
        if (given.expected_s is None) == (other.expected_s is None)
        else None,
    )


def _per_unit(count: int, outcome: Outcome) -> float | None:
    return count / outcome.units if outcome.units else float(count)


def _relative(given: float | None, other: float | None) -> float | None:
    return other / given - 1 if given and other is not None else None


def what_if(
    given: Choice,
    price: Callable[[Choice], Priced],
    *,
    devices: Sequence[str] = DEVICES_TRIED,
    split: int = SPLIT,
    progress: Callable[[str], None] | None = None,
) -> WhatIf:
    """Changes one knob at a time and prices each run whole.

    Args:
        price: the figures of a choice (records it where it must).
        split: microbatches that each batch is divided into.
        progress: is told what is being priced.

    Raises:
        PreflopError: the given run cannot be priced.
        BadNumber: `split` does not divide the batch (asked for: the default is left out where it does not).
    """
    said = progress or (lambda words: None)
    said("the given run")
    first = Row("", "as given", given, Route.PRICE, Keeps.MATHEMATICS, outcome_of(price(given)))
    rows = []
    for knob, words, choice, keeps in changes(given, devices=devices, split=split):
        said(words)
        route = route_of(given, choice, same_kernels=_same_kernels(given.device, choice.device))
        try:
            outcome = outcome_of(price(choice))
        except PreflopError as error:
            reason = str(error).splitlines()[0]
            rows.append(Row(knob, words, choice, route, keeps, None, reason))
            continue
        rows.append(Row(knob, words, choice, route, keeps, outcome))
    return WhatIf(first, tuple(rows), advice(first, rows))


def changes(
    given: Choice, *, devices: Sequence[str] = DEVICES_TRIED, split: int = SPLIT
) -> Iterator[tuple[str, str, Choice, Keeps]]:
    """(knob, words, choice, what it keeps) for each change of one knob.

    >>> [words for _, words, _, _ in changes(Choice(batch=8), devices=())][:2]
    ['batch 4, 2 microbatches', 'recompute selective']
    """
    yield from _splits(given, split)
    if isinstance(given.recompute, str):
        for mode in RECOMPUTE_MODES:
            if mode != given.recompute:
                yield "recompute", f"recompute {mode}", given.but(recompute=mode), Keeps.MATHEMATICS
    if given.loss_chunks == 1:
        yield "loss", f"loss in {LOSS_CHUNKS} chunks", given.but(loss_chunks=LOSS_CHUNKS), Keeps.MATHEMATICS
    if not given.offload:
        yield "offload", "offload activations", given.but(offload=True), Keeps.MATHEMATICS
    for name in PRECISIONS:
        if name != given.precision:
            yield "precision", name, given.but(precision=name), _kept_by_precision(given.precision, name)
    if given.optimizer is not None:
        for name in (*OPTIMIZERS_TRIED, *_in_backward(given.optimizer)):
            if name != given.optimizer:
                yield "optimizer", name, given.but(optimizer=name), _kept_by_optimizer(given.optimizer, name)
    if _could_expand(given):
        set_too = ",".join(filter(None, (given.alloc_conf, EXPANDABLE)))
        yield "allocator", EXPANDABLE, given.but(alloc_conf=set_too), Keeps.MATHEMATICS
    own = None if given.device == "cpu" else device_with_figures(given.device).id
    for name in dict.fromkeys(device_with_figures(name).id for name in devices):
        if name != own:
            yield "device", name, given.but(device=name), Keeps.MATHEMATICS


def _could_expand(given: Choice) -> bool:
    """Whether the device's allocator has segments that could grow and do not."""
    if given.device == "cpu" or device_with_figures(given.device).compute_capability is None:
        return False
    return not AllocatorSettings.parse(given.alloc_conf).expandable_segments


def _splits(given: Choice, split: int) -> Iterator[tuple[str, str, Choice, Keeps]]:
    """Smaller batches and more of them; and the reverse, where there are several microbatches."""
    if given.batch is None:
        return
    if given.batch % split == 0 and split > 1:
        choice = given.but(batch=given.batch // split, microbatches=given.microbatches * split)
        yield "batch", _batch_words(choice), choice, Keeps.MATHEMATICS
    if given.microbatches % split == 0 and split > 1:
        choice = given.but(batch=given.batch * split, microbatches=given.microbatches // split)
        yield "batch", _batch_words(choice), choice, Keeps.MATHEMATICS


def check_split(batch: int | None, split: int) -> None:
    """Refuse a split that was asked for and cannot be made.

    Raises:
        BadNumber: it does not divide the batch.
    """
    if batch is None:
        raise BadNumber(
            f"a split into {split} needs a batch with a size.\n"
            "  Give --batch N with a named model or a config.json; a batch of your own is not cut."
        )
    if split < 1 or batch % split:
        divisors = [n for n in range(1, batch + 1) if batch % n == 0]
        raise BadNumber(
            f"a batch of {batch} cannot be split into {split} equal microbatches.\n"
            f"  Divisors of {batch}: {', '.join(map(str, divisors[:12]))}"
            f"{', ...' if len(divisors) > 12 else ''}."
        )


def _batch_words(choice: Choice) -> str:
    plural = "" if choice.microbatches == 1 else "es"
    return f"batch {choice.batch}, {choice.microbatches} microbatch{plural}"


def _kept_by_precision(given: str, name: str) -> Keeps:
    """Weights that stay fp32 (or have an fp32 master copy) are kept; going up in precision keeps them too."""
    other = PRECISIONS[name]
    exact = other.parameter_dtype == "float32" or other.master_copy
    if exact:
        return Keeps.WEIGHTS
    before = PRECISIONS.get(given)
    if before is None or before.master_copy or before.parameter_dtype != other.parameter_dtype:
        return Keeps.ALGORITHM
    return Keeps.WEIGHTS


def _in_backward(given: Any) -> tuple[str, ...]:
    """The given optimizer, by name, with its updates in backward; or at the end, where they are there."""
    if not isinstance(given, str):
        return ()
    spec = find_optimizer(given)
    return (spec.name.removesuffix(IN_BACKWARD) if spec.in_backward else f"{spec.name}{IN_BACKWARD}",)


def _kept_by_optimizer(given: Any, name: str) -> Keeps:
    """The same class with the same options, run otherwise (loop, foreach, fused, in backward), is the same
    update."""
    before = find_optimizer(given) if isinstance(given, str) else given
    if not isinstance(before, OptimizerSpec):
        return Keeps.NOTHING
    return Keeps.MATHEMATICS if _update(before) == _update(find_optimizer(name)) else Keeps.NOTHING


def _update(spec: OptimizerSpec) -> tuple[str, dict[str, object]]:
    """What an optimizer computes, however it is run."""
    options = {name: value for name, value in spec.kwargs.items() if name not in ("foreach", "fused")}
    return spec.torch_class, options


def _same_kernels(one: str, other: str) -> bool:
    """Whether two devices run the same recorded calls: CUDA devices of one compute capability."""
    if "cpu" in (one, other):
        return one == other
    a, b = device_with_figures(one).compute_capability, device_with_figures(other).compute_capability
    return a is not None and a == b


# -- what to change first ---------------------------------------------------------------------------


def advice(given: Row, rows: Sequence[Row]) -> str:
    """One sentence or two: what to change first, and why."""
    if given.outcome is None:
        raise ValueError("the given run has no outcome")
    if given.outcome.fits is False:
        return _make_it_fit(given.outcome, rows)
    if given.outcome.per_unit_s is None:
        return _spare_memory(given.outcome, rows)
    return _make_it_faster(given, given.outcome, rows)


def _make_it_fit(given: Outcome, rows: Sequence[Row]) -> str:
    over = bytes_text(-(given.spare_bytes or 0))
    fitting = [row for row in rows if row.outcome is not None and row.outcome.fits]
    here = [row for row in fitting if row.knob != "device"]
    if here:
        best = min(here, key=lambda row: (row.keeps, _time(row)))
        after = best.outcome
        assert after is not None
        changed = change(given, after)
        cost = _cost_words(changed.time)
        return (
            f"Change first: {best.words}. The run does not fit, by {over}; with it the peak falls by "
            f"{bytes_text(given.peak_bytes - after.peak_bytes)} and {bytes_text(after.spare_bytes or 0)} are "
            f"to spare{cost}{_caution(best)}."
        )
    if fitting:
        best = min(fitting, key=lambda row: device_with_figures(row.choice.device).memory_bytes)
        return (
            f"Change first: the device. The run does not fit, by {over}, and no other single change makes it "
            f"fit; {best.words} is the smallest of those tried that holds it."
        )
    lowest = min((row for row in rows if row.knob != "device"), key=_peak, default=None)
    if lowest is None or lowest.outcome is None or lowest.outcome.peak_bytes >= given.peak_bytes:
        return f"The run does not fit, by {over}, and nothing that was tried lowers its peak: shard it."
    saved = bytes_text(given.peak_bytes - lowest.outcome.peak_bytes)
    return (
        f"Change first: {lowest.words}, which saves most ({saved} of the peak{_caution(lowest)}). No single "
        f"change that was tried makes the run fit: it lacks {over}. Combine it with a smaller batch, or "
        "shard."
    )


def _make_it_faster(run: Row, given: Outcome, rows: Sequence[Row]) -> str:
    here = [
        row
        for row in rows
        if row.outcome is not None
        and row.outcome.fits is not False
        and row.outcome.per_unit_s is not None
        # A lower bound is no time to compare an expected one with.
        and (row.outcome.expected_s is None) == (given.expected_s is None)
    ]
    tried = [row for row in here if row.knob != "device" and row.keeps <= Keeps.WEIGHTS]
    best = min(tried, key=_time, default=None)
    gain = 0.0 if best is None else -(change(given, best.outcome).time or 0.0)
    if best is not None and best.outcome is not None and gain >= _WORTH:
        return (
            f"Change first: {best.words}. It takes {gain:.0%} off the time per {_unit(given)}: "
            f"{_why(run, given, best, best.outcome)}{_caution(best)}."
        )
    fastest = min((row for row in here if row.knob == "device"), key=_time, default=None)
    gain = 0.0 if fastest is None else -(change(given, fastest.outcome).time or 0.0)
    if fastest is not None and gain >= _WORTH:
        return (
            "Change nothing but the device: no other change that keeps the training takes even "
            f"{_WORTH:.0%} off the time; {fastest.words} takes {gain:.0%} off."
        )
    return f"Change nothing: no change that was tried takes even {_WORTH:.0%} off the time and fits."


def _spare_memory(given: Outcome, rows: Sequence[Row]) -> str:
    """Without a time (no device, or one without figures): what saves memory."""
    saving = [row for row in rows if row.knob != "device" and row.keeps is Keeps.MATHEMATICS]
    best = min(saving, key=_peak, default=None)
    timed = "" if given.no_peak else " Name a --device to learn what makes it faster."
    if best is None or best.outcome is None or best.outcome.peak_bytes >= given.peak_bytes:
        return f"Nothing that was tried lowers the peak.{timed}"
    share = 1 - best.outcome.peak_bytes / given.peak_bytes
    return (
        f"Change first, to save memory: {best.words}, which takes {share:.0%} off the peak and keeps the "
        f"training as it is.{timed}"
    )


def _time(row: Row) -> float:
    seconds = None if row.outcome is None else row.outcome.per_unit_s
    return float("inf") if seconds is None else seconds


def _peak(row: Row) -> float:
    return float("inf") if row.outcome is None else row.outcome.peak_bytes


def _unit(outcome: Outcome) -> str:
    return "token" if outcome.tokens else "sample"


def _why(run: Row, given: Outcome, best: Row, after: Outcome) -> str:
    """What of the step became less."""
    changed = change(given, after)
    said = []
    if changed.flops is not None and changed.flops < -_WORTH:
        said.append(f"{-changed.flops:.0%} fewer FLOPs")
    if changed.moved is not None and changed.moved < -_WORTH:
        said.append(f"{-changed.moved:.0%} fewer bytes moved")
    explained = max(-(changed.flops or 0.0), -(changed.moved or 0.0), 0.0)
    computes = [PRECISIONS[row.choice.precision].compute_dtype for row in (run, best)]
    if computes[0] != computes[1]:
        said.insert(0, f"its matmuls run in {computes[1]}")
    elif -(changed.time or 0.0) > explained + _WORTH:
        said.insert(0, "fewer kernels to launch")
    return " and ".join(said)


def _caution(row: Row) -> str:
    return {
        Keeps.MATHEMATICS: "",
        Keeps.WEIGHTS: "" if row.knob != "precision" else "; activations are rounded otherwise",
        Keeps.ALGORITHM: "; weights are then rounded otherwise, so check the loss",
        Keeps.NOTHING: "; it is another optimizer, to be tuned anew",
    }[row.keeps]


def _cost_words(time: float | None) -> str:
    if time is None or abs(time) < _WORTH / 2:
        return ""
    return f", at {abs(time):.0%} {'more' if time > 0 else 'less'} time"
