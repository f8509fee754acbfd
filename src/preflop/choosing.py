"""A model ready to be priced at any choice: shipped tapes where there are, else recorded ones.

May import: tapes, subject, models.catalog, plan, accounting, api, timing; record [torch] through `parametric`, when
called.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from preflop.account import Priced
from preflop.accounting import CPU, Account, Counts, account_tape, count, find_device, priced_tape
from preflop.api import shipped_of, tape_of_subject
from preflop.axes import SEQ, Axis, size_batch
from preflop.errors import BadSubject, PreflopError, described
from preflop.hardware.device import Device
from preflop.ledgers.flops import flops_totals
from preflop.ledgers.memory import memory
from preflop.ledgers.traffic import traffic_ledger
from preflop.models.catalog import ModelFacts, find, known
from preflop.optimizers import IN_BACKWARD, OptimizerSpec
from preflop.plan.choice import Choice
from preflop.plan.choices import Choices
from preflop.plan.evaluate import Evaluator
from preflop.plan.formulas import FormulaRow, formula_rows
from preflop.plan.what_if import DEVICES_TRIED, SPLIT, WhatIf, check_split
from preflop.plan.what_if import what_if as plan_what_if
from preflop.precision import update_apart
from preflop.recomputation import NONE
from preflop.subject import RECOMPUTE, Subject, needs_batch, resized, resolve
from preflop.tape.events import Tape
from preflop.tape.lives import plain
from preflop.tape.sizes import NotPolynomial, ParametricTape, Span
from preflop.tape.stack import CutTape, Refused
from preflop.tapes.choose import shipped_at_any_size, shipped_in_part
from preflop.tapes.store import OPTIMIZER
from preflop.timing.this import recorded_as
from preflop.transforms.accumulation import accumulate
from preflop.transforms.chunked_loss import head_of, with_chunked_loss
from preflop.transforms.depth import unfold
from preflop.transforms.in_backward import update_in_backward
from preflop.transforms.offload import offload
from preflop.transforms.optimizer import gradient_metas, with_optimizer
from preflop.transforms.recompute import recompute_at_any_size, recompute_cut

SubjectAt = Callable[..., Subject]
"""The subject at a batch and a length along each axis."""


def choices(
    model: Any,
    batch: Any = None,
    *,
    recompute: str | Sequence[str] = RECOMPUTE,
    optimizer: Any = "adamw",
    precision: str = "fp32",
    device: str = "cpu",
) -> Choices:
    """A model ready to be priced at any batch, lengths, accumulation and recomputation.

    Tapes that ship are taken (without torch); the others are recorded at a few small sizes.

    Args:
        model: as for `preflop.account`.
        batch: one that can be resized: sizes, for a config.json (`{"batch_size": 2, "source_length": 64,
            "target_length": 64}`), or `preflop.sized_batch` for a module or a factory. A named model needs none.
        recompute: the mode or modes that will be asked for.
        device: whose kernels are recorded, and whose rates give the time.

    Raises:
        PreflopError: a name that is not known; a batch of one size.
        NotPolynomial: sizes of the step are no polynomials; record each size by itself.
    """
    if batch is None and isinstance(model, str) and known(model):
        regime = find(model).regimes[0]
        batch = size_batch(regime, _ANY_BATCH, [_ANY_LENGTH] * len(regime))
    if batch is None:
        raise BadSubject(
            f"choices are made of batches of many sizes, and {described(model)} does not say how one is made.\n"
            "  Needed: a named model of `preflop models`, or a batch that can be resized: sizes for a config.json, "
            "preflop.sized_batch(make, batch=2, ...) for a module or a factory; price "
            "one batch with preflop.account."
        )
    modes = (recompute,) if isinstance(recompute, str) else recompute
    target = find_device(device)
    common = {"optimizer": optimizer, "precision": precision, "device": _recorded_for(target)}

    def family(mode: str) -> Family:
        return family_of(model, batch, {**common, "recompute": mode}, "choices")

    def recorded(mode: str, *, lives: bool = False) -> list[ParametricTape]:
        found = family(mode)
        return _recorded(found.subject_at, found.regimes, lives=lives)

    tapes: dict[str, list[ParametricTape]] = {}
    annotated: list[ParametricTape] = []
    for mode in modes:
        shipped = shipped_at_any_size(family(mode).subject)
        if shipped:
            tapes[mode] = shipped
            continue
        try:
            annotated = annotated or recorded(NONE, lives=True)
            tapes[mode] = [recompute_at_any_size(tape, how=mode) for tape in annotated]
        except (Refused, NotPolynomial):
            tapes[mode] = recorded(mode)
    return Choices(tapes, device=target)


_ANY_BATCH, _ANY_LENGTH = 2, 128
"""A size at which a named model is asked for, to find what ships of it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """A subject, and the same at other sizes."""

    subject: Subject
    subject_at: SubjectAt

    @property
    def regimes(self) -> tuple[tuple[Axis, ...], ...]:
        """Its axes, for each stretch of lengths with one structure."""
        return self.subject.regimes

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes that were asked for."""
        assert self.subject.sizes is not None
        return self.subject.sizes


def family_of(model: Any, batch: Any, options: dict[str, Any], who: str) -> Family:
    """The subject of `preflop.account`'s arguments, and the same at other sizes.

    Args:
        who: what needs other sizes, for the message.

    Raises:
        BadSubject: the batch is data of one size.
    """
    subject = resolve(model, batch, **options)
    if subject.sizes is None:
        raise BadSubject(
            f"{who} need a batch whose sizes can be changed.\n"
            "  Name a model of `preflop models` or a config.json, with --batch (and --seq); or give --batch-from a "
            "function with parameters batch, seq, source, target or frames (in Python: preflop.sized_batch)."
        )
    axes = subject.regimes[0]

    def subject_at(size: int, *lengths: int) -> Subject:
        return resolve(model, resized(batch, axes, size, lengths), **options)

    return Family(subject, subject_at)


def _recorded(
    subject_at: SubjectAt, regimes: Iterable[tuple[Axis, ...]], *, lives: bool = False
) -> list[ParametricTape]:
    from preflop.parametric import parametric_tapes

    return [tape for axes in regimes for tape in parametric_tapes(subject_at, axes=axes, lives=lives)]


class Accounts:
    """Prices the choices of one subject; a tape is made once for all devices that run the same kernels."""

    def __init__(self, model: Any, batch: Any, given: Account | None = None, **options: Any) -> None:
        """Takes the arguments of `preflop.account`.

        Args:
            given: the account of the subject as it is, where it was made already.
        """
        alloc_conf = options.pop("alloc_conf", "")
        self._model, self._batch, self._options = model, batch, options
        target = find_device(options.get("device", CPU), alloc_conf)
        subject = resolve(model, batch, **{**options, "device": CPU})
        self._axes = subject.regimes[0] if subject.regimes else ()
        self._sizes = subject.sizes
        self.choice = Choice(
            batch=None if subject.sizes is None else subject.sizes[0], seq=_sequence(subject),
            microbatches=options.get("microbatches", 1),
            recompute=options.get("recompute", "none"), precision=options.get("precision", "fp32"),
            optimizer=options.get("optimizer", "adamw"), device=CPU if target is None else target.id,
            alloc_conf=alloc_conf,
        )  # fmt: skip
        self._known: dict[Any, Tape] = {}
        self._counts: dict[Any, Counts] = {}
        self._annotated: dict[Any, CutTape | None] = {}
        if given is not None:
            self._known[self._key(self.choice)] = given.tape

    def account(self, choice: Choice) -> Account:
        """The account of a choice.

        Raises:
            PreflopError: it cannot be run.
        """
        return account_tape(*self._on_device(choice))

    def price(self, choice: Choice) -> Priced:
        """The figures of a choice: its account without words, which comparing many does not need.

        Raises:
            PreflopError: it cannot be run.
        """
        tape, target = self._on_device(choice)
        key = self._key(choice)
        if key not in self._counts:
            self._counts[key] = count(tape)
        return priced_tape(tape, self._counts[key], target)

    def _on_device(self, choice: Choice) -> tuple[Tape, Device | None]:
        """The tape of a choice as its device runs it, and the device."""
        target = find_device(choice.device, choice.alloc_conf)
        tape = self._tape(choice)
        if tape.subject is not None:
            tape = dataclasses.replace(
                tape,
                subject=dataclasses.replace(
                    tape.subject, device=_recorded_for(target), precision=choice.precision
                ),
            )
        return tape, target

    def _tape(self, choice: Choice) -> Tape:
        """The tape of a choice: known, transformed from a known one, or made now."""
        key = self._key(choice)
        if key not in self._known:
            subject = self._subject(choice)
            if choice.loss_chunks > 1:
                self._known[key] = self._in_chunks(choice, subject)
            elif choice.offload:
                self._known[key] = offloaded(subject, self._annotated_of(choice.but(offload=False)))
            else:
                found = shipped_of(subject) or self._updated(choice, subject) or self._recomputed(choice)
                self._known[key] = found or tape_of_subject(subject)
        return self._known[key]

    def _in_chunks(self, choice: Choice, subject: Subject) -> Tape:
        """The tape of a choice whose loss is made in chunks. Updates in backward stand between the loss's
        gradients, so they are moved there afterwards."""
        spec = subject.optimizer
        if not isinstance(spec, OptimizerSpec) or not spec.in_backward:
            return in_chunks(self._tape(choice.but(loss_chunks=1)), subject, choice.loss_chunks)
        at_end = choice.but(optimizer=spec.name.removesuffix(IN_BACKWARD))
        whole = self._tape(at_end.but(loss_chunks=1))
        return updated_in_backward(in_chunks(whole, self._subject(at_end), choice.loss_chunks), subject)

    def _updated(self, choice: Choice, subject: Subject) -> Tape | None:
        """The tape of a choice whose step differs in its update from one that is at hand, with that update put
        into it; None where it must be recorded."""
        if not isinstance(subject.optimizer, OptimizerSpec) or subject.precision.scaled:
            return None
        try:
            cut = self._otherwise_updated(choice)
            if cut is None:
                return None
            tape = unfold(dataclasses.replace(cut, tape=updated(cut.tape, subject)))
            assert tape.subject is not None, "it is of a step"
            more = choice.microbatches // tape.subject.microbatches
            return accumulate(tape, microbatches=more) if more > 1 else tape
        except Refused:
            return None

    def _otherwise_updated(self, choice: Choice) -> CutTape | None:
        """The cut tape of a step that is the choice's up to its update, of one microbatch or of all: one that
        ships, else the given run's, if that is one."""
        alike = update_apart(choice.precision)
        ships = shipped_in_part(self._subject(choice.but(optimizer=OPTIMIZER, precision=alike, microbatches=1)))
        if ships is not None:
            return ships
        base = choice.but(optimizer=self.choice.optimizer)
        if base == choice:
            return None  # its own update: there is nothing to put in
        own = self._subject(base).optimizer
        if self._key(base) != self._key(self.choice) or not isinstance(own, OptimizerSpec) or own.in_backward:
            return None
        annotated = self._annotated_of(base.but(recompute=NONE))
        return None if annotated is None else recompute_cut(annotated, how=base.recompute)

    def _recomputed(self, choice: Choice) -> Tape | None:
        """The tape of a choice that recomputes, from that of the one that does not; None where it must be
        recorded."""
        if choice.recompute == NONE:
            return None
        annotated = self._annotated_of(choice.but(recompute=NONE))
        try:
            return None if annotated is None else unfold(recompute_cut(annotated, how=choice.recompute))
        except Refused:
            return None

    def _annotated_of(self, choice: Choice) -> CutTape | None:
        """As `_annotate`, which is asked once."""
        key = self._key(choice)
        if key not in self._annotated:
            self._annotated[key] = self._annotate(choice)
        return self._annotated[key]

    def _annotate(self, choice: Choice) -> CutTape | None:
        """The annotated tape of a choice, if following its saved tensors did not move the step."""
        subject = self._subject(choice)
        ships = shipped_in_part(subject, lives=True)
        if ships is not None:
            return ships
        from preflop.folding import annotated_of

        try:
            annotated = annotated_of(subject)
            seen = plain(unfold(annotated))
        except (Refused, PreflopError):
            return None
        tape = self._tape(choice)
        return annotated if _figures(seen) == _figures(tape) else None

    def _subject(self, choice: Choice) -> Subject:
        batch = self._batch
        if choice.batch is not None and self._sizes is not None:
            lengths = self._sizes[1:] if choice.seq is None else (choice.seq,)
            batch = resized(batch, self._axes, choice.batch, lengths)
        changed = {
            "microbatches": choice.microbatches, "recompute": choice.recompute, "precision": choice.precision,
            "optimizer": choice.optimizer, "device": _recorded_for(find_device(choice.device)),
        }  # fmt: skip
        return resolve(self._model, batch, **{**self._options, **changed})

    @staticmethod
    def _key(choice: Choice) -> Any:
        """Equal for choices whose tapes are equal: devices of one compute capability run the same calls."""
        target = find_device(choice.device)
        kernels: Any = CPU if target is None else target.compute_capability or target.id
        precision = "fp32" if choice.precision == "tf32" else choice.precision
        return choice.but(device="", alloc_conf="", precision=precision), kernels


def _sequence(subject: Subject) -> int | None:
    """The sequence length of a subject whose one length that is."""
    one = subject.sizes is not None and [axis.name for axis in subject.regimes[0]] == [SEQ]
    return subject.sizes[1] if one and subject.sizes is not None and len(subject.sizes) > 1 else None


def _recorded_for(target: Device | None) -> str:
    """By whose rules a step for the device is recorded."""
    return CPU if target is None else recorded_as(target)


def _figures(tape: Tape) -> tuple[Any, ...]:
    """What a step costs, in bytes and FLOPs."""
    found = memory(tape)
    return (
        found.peak_bytes, found.first_step_peak_bytes, found.at_peak, found.columns,
        flops_totals(tape), traffic_ledger(tape).total(),
    )  # fmt: skip


def in_chunks(tape: Tape, subject: Subject, chunks: int) -> Tape:
    """The subject's tape with its head and cross entropy made in so many parts of its rows.

    Raises:
        BadSubject: the tape has no such loss; the reason names the call that is in the way.
    """
    try:
        head = head_of(tape)
    except Refused as reason:
        raise BadSubject(f"{subject.name}'s loss cannot be made in chunks: {reason}.") from reason
    from preflop.record.loss_tape import record_loss

    return with_chunked_loss(tape, record_loss(subject, head, chunks=chunks))


def updated(tape: Tape, subject: Subject) -> Tape:
    """The tape of a step with its updates at the end, with the subject's update instead.

    Raises:
        Refused: the update is in backward and the tape has several microbatches, or what the old update
            made or read is used otherwise.
    """
    from preflop.record.optimizer_tape import record_optimizer

    update = record_optimizer(subject, tape.parameters, gradient_metas(tape))
    spec = subject.optimizer
    if isinstance(spec, OptimizerSpec) and spec.in_backward:
        return update_in_backward(tape, update, name=subject.optimizer_name or "")
    return with_optimizer(tape, update, name=subject.optimizer_name)


def updated_in_backward(tape: Tape, subject: Subject) -> Tape:
    """As `updated`, for an optimizer in backward that was asked for.

    Raises:
        BadSubject: the tape has several microbatches, or uses gradients otherwise; the reason says which.
    """
    try:
        return updated(tape, subject)
    except Refused as reason:
        raise BadSubject(f"{subject.name} cannot be updated in backward: {reason}.") from reason


def offloaded(subject: Subject, annotated: CutTape | None) -> Tape:
    """The subject's tape with what its blocks keep for backward in the host's memory.

    Args:
        annotated: its annotated tape; None where what holds its tensors cannot be followed.

    Raises:
        BadSubject: it recomputes, has no blocks, or cannot be followed; the reason says why.
    """
    words = f"activations of {subject.name} cannot be offloaded"
    if subject.recompute != NONE:
        raise BadSubject(f"{words}: what its blocks keep is recomputed.\n  Take recompute='none' with offload.")
    if annotated is None:
        raise BadSubject(f"{words}: what holds its tensors cannot be followed.")
    try:
        return offload(unfold(annotated))
    except Refused as reason:
        raise BadSubject(f"{words}: {reason}.") from reason


def what_if(
    model: Any,
    batch: Any = None,
    *,
    devices: str | Sequence[str] = DEVICES_TRIED,
    split: int | None = None,
    given: Account | None = None,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> WhatIf:
    """One knob at a time from the given run: accumulation, recomputation, precision, optimizer, device.

    Args:
        model: as for `preflop.account`; so are `batch` and every other option.
        devices: the name or names of those to compare with.
        split: microbatches that the batch is cut into; None: two, where the batch is even.
        given: the account of the run as it is, where it was made already.
        progress: is told what is being priced.

    Raises:
        PreflopError: something about the arguments; the message says what to do.
    """
    others = (devices,) if isinstance(devices, str) else devices
    for name in others:
        find_device(name)
    prices = Accounts(model, batch, given, **options)
    if split is not None:
        check_split(prices.choice.batch, split)
    return plan_what_if(
        prices.choice, prices.price, devices=others, split=split or SPLIT, progress=progress
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Formulas:
    """The operators of a step as formulas, and what the model calls its sizes."""

    rows: tuple[FormulaRow, ...]
    names: dict[str, int]
    """The model's sizes by name."""
    holds: str
    """Where the formulas hold, in words."""
    letters: dict[str, str]
    """What each letter but B, the batch, stands for."""


def formulas(model: Any, batch: Any, **options: Any) -> Formulas:
    """The operators of a step as formulas in batch and the lengths of its axes.

    Args:
        model: as for `preflop.account`; so is the rest.
        batch: sizes, or `preflop.sized_batch`.

    Raises:
        BadSubject: a batch whose sizes cannot be written as letters.
        PreflopError: sizes of the step are no polynomials, or something about the arguments.
    """
    target = find_device(options.pop("device", CPU), options.pop("alloc_conf", ""))
    microbatches = options.pop("microbatches", 1)
    if batch is None:
        raise needs_batch()
    family = family_of(model, batch, {**options, "device": _recorded_for(target)}, "formulas")
    sizes, name = family.sizes, family.subject.name
    tapes = shipped_at_any_size(family.subject)
    if not any(tape.holds(*sizes) for tape in tapes):
        try:
            tapes = _recorded(family.subject_at, [_regime(family)])
        except (NotPolynomial, Refused) as reason:
            raise BadSubject(f"{name} has no formulas in its sizes: {reason}.") from reason
    tape = next((tape for tape in tapes if tape.holds(*sizes)), None)
    if tape is None:
        where = " or ".join(_domain_words(tape) for tape in tapes)
        asked = ParametricTape.asked(sizes[0], **_named_lengths(family))
        raise BadSubject(
            f"the formulas of {name} hold at {where}, and not at {asked}.\n  Ask at a size where they hold."
        )
    steps = tape.steps(*sizes[1:])
    assert steps is not None, "it holds the size"
    facts = find(model) if isinstance(model, str) and known(model) else None
    names = {} if facts is None else _size_names(facts)
    rows = formula_rows(Evaluator(tape).rows(microbatches), (sizes[0], *steps), names, tape.axes)
    letters = {axis.letter: axis.words for axis in tape.axes}
    return Formulas(tuple(rows), names, _domain_words(tape), letters)


def _regime(family: Family) -> tuple[Axis, ...]:
    """The axes for the stretch of lengths that the family's own are in: the first whose ends they do not pass,
    else the last."""
    lengths = family.sizes[1:]
    return next(
        (
            axes
            for axes in family.regimes
            if all(axis.most is None or length <= axis.most for axis, length in zip(axes, lengths))
        ),
        family.regimes[-1],
    )


def _named_lengths(family: Family) -> dict[str, int]:
    return {axis.name: length for axis, length in zip(family.regimes[0], family.sizes[1:])}


def _size_names(facts: ModelFacts) -> dict[str, int]:
    names = "hidden heads kv_heads head_dim ffn vocab max_positions patch_size classes".split()
    return {name: getattr(facts, name) for name in names if getattr(facts, name) is not None}


def _domain_words(tape: ParametricTape) -> str:
    """Where a tape holds.

    >>> from preflop.axes import Axis
    >>> from preflop.tape.sizes import Domain, ParametricTape, Span
    >>> span = Span(2, 512)
    >>> axes = (Axis("source"), Axis("frames", unit=320, rest=80))
    >>> _domain_words(ParametricTape(Tape(subject=None), (), axes=axes, domain=Domain(2, None, (span, Span(2)))))
    'B >= 2, 2 <= source <= 512, 2 <= F with F = (frames - 80) / 320'
    """
    domain = tape.domain
    batch = f"B >= {domain.least_batch}" if domain.most_batch is None else f"B = {domain.most_batch}"
    return ", ".join([batch, *(_span_words(axis, span) for axis, span in zip(tape.axes, domain.spans))])


def _span_words(axis: Axis, span: Span) -> str:
    most = "" if span.most is None else f" <= {span.most}"
    multiple = "" if span.multiple == 1 else f", a multiple of {span.multiple}"
    meant = "" if axis.unit == 1 else f" with {axis.letter} = {axis.words}"
    return f"{span.least} <= {axis.letter}{most}{multiple}{meant}"
