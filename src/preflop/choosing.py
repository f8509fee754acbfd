"""A model ready to be priced at any choice: shipped tapes where there are, else recorded ones.

May import: tapes, subject, models.catalog, plan, accounting, api, timing; record [torch] through `parametric`, when
called.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from preflop.account import Priced
from preflop.accounting import CPU, Account, Counts, account_tape, count, find_device, priced_tape
from preflop.api import shipped_of, tape_of_subject
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
from preflop.recomputation import NONE
from preflop.subject import RECOMPUTE, Subject, batch_sizes, resolve
from preflop.tape.events import Tape
from preflop.tape.lives import plain
from preflop.tape.sizes import Domain, NotPolynomial, ParametricTape
from preflop.tape.stack import Refused
from preflop.tapes.choose import shipped_at_any_size
from preflop.timing.this import recorded_as
from preflop.transforms.chunked_loss import head_of, with_chunked_loss
from preflop.transforms.in_backward import update_in_backward
from preflop.transforms.offload import offload
from preflop.transforms.optimizer import gradient_metas
from preflop.transforms.recompute import recompute_at_any_size

if TYPE_CHECKING:
    from preflop.record.subject_tape import CutTape

SubjectAt = Callable[[int, "int | None"], Subject]


def choices(
    model: str,
    *,
    recompute: str | Sequence[str] = RECOMPUTE,
    optimizer: Any = "adamw",
    precision: str = "fp32",
    device: str = "cpu",
) -> Choices:
    """A named model ready to be priced at any batch, sequence, accumulation and recomputation.

    Named, because batches of other sizes are made for it: a module or factory is priced one batch at a
    time, with `preflop.account`.

    Tapes that ship are taken (without torch); the others are recorded at a few small sizes.

    Args:
        recompute: the mode or modes that will be asked for.
        device: whose kernels are recorded, and whose rates give the time.

    Raises:
        PreflopError: a name that is not known.
        NotPolynomial: sizes of the step are no polynomials; record each size by itself.
    """
    if not isinstance(model, str):
        raise BadSubject(
            f"choices are of a named model, for which batches of other sizes can be made, and not of "
            f"{described(model)}.\n"
            "  Give a name of `preflop models`; price a module or a factory one batch at a time, with "
            "preflop.account."
        )
    modes = (recompute,) if isinstance(recompute, str) else recompute
    target = find_device(device)
    facts = find(model)
    kernels = _recorded_for(target)
    regimes = _regimes(facts)

    def subject_at(mode: str) -> SubjectAt:
        def at(batch: int, seq: int | None) -> Subject:
            size = {"batch_size": batch} | ({} if seq is None else {"sequence_length": seq})
            return resolve(
                facts.name, size, recompute=mode, optimizer=optimizer, precision=precision, device=kernels
            )

        return at

    def recorded(mode: str, *, lives: bool = False) -> list[ParametricTape]:
        return _recorded(subject_at(mode), regimes, has_sequence=not facts.is_image, lives=lives)

    tapes: dict[str, list[ParametricTape]] = {}
    annotated: list[ParametricTape] = []
    for mode in modes:
        shipped = shipped_at_any_size(subject_at(mode)(2, None if facts.is_image else 128))
        if shipped:
            tapes[mode] = shipped
            continue
        try:
            annotated = annotated or recorded(NONE, lives=True)
            tapes[mode] = [recompute_at_any_size(tape, how=mode) for tape in annotated]
        except (Refused, NotPolynomial):
            tapes[mode] = recorded(mode)
    return Choices(tapes, device=target)


def _recorded(
    subject_at: SubjectAt,
    regimes: list[tuple[int, int | None]],
    *,
    has_sequence: bool,
    lives: bool = False,
) -> list[ParametricTape]:
    from preflop.parametric import parametric_tapes

    return [
        tape
        for after, most in regimes
        for tape in parametric_tapes(
            subject_at, has_sequence=has_sequence, after=after, most_seq=most, lives=lives
        )
    ]


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
        sizes = batch_sizes(batch) if isinstance(model, str) and batch is not None else None
        batch_size, seq = sizes or (None, None)
        self.choice = Choice(
            batch=batch_size, seq=seq, microbatches=options.get("microbatches", 1),
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
                found = shipped_of(subject) or self._recomputed(choice)
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

    def _recomputed(self, choice: Choice) -> Tape | None:
        """The tape of a choice that recomputes, from that of the one that does not; None where it must be
        recorded."""
        from preflop.folding import recomputed

        if choice.recompute == NONE:
            return None
        annotated = self._annotated_of(choice.but(recompute=NONE))
        try:
            return None if annotated is None else recomputed(annotated, choice.recompute)
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
        from preflop.folding import annotated_of, unfold

        try:
            annotated = annotated_of(self._subject(choice))
            seen = plain(unfold(annotated))
        except (Refused, PreflopError):
            return None
        tape = self._tape(choice)
        return annotated if _figures(seen) == _figures(tape) else None

    def _subject(self, choice: Choice) -> Subject:
        batch = self._batch
        if choice.batch is not None:
            batch = {"batch_size": choice.batch}
            if choice.seq is not None:
                batch["sequence_length"] = choice.seq
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


def updated_in_backward(tape: Tape, subject: Subject) -> Tape:
    """The tape of a step with its updates at the end, moved into backward.

    Args:
        subject: with the optimizer in backward.

    Raises:
        BadSubject: the tape has several microbatches, or uses gradients otherwise; the reason says which.
    """
    from preflop.record.optimizer_tape import record_optimizer

    update = record_optimizer(subject, tape.parameters, gradient_metas(tape))
    try:
        return update_in_backward(tape, update, name=subject.optimizer_name or "")
    except Refused as reason:
        raise BadSubject(f"{subject.name} cannot be updated in backward: {reason}.") from reason


def offloaded(subject: Subject, annotated: CutTape | None) -> Tape:
    """The subject's tape with what its blocks keep for backward in the host's memory.

    Args:
        annotated: its annotated tape; None where what holds its tensors cannot be followed.

    Raises:
        BadSubject: it recomputes, has no blocks, or cannot be followed; the reason says why.
    """
    from preflop.folding import unfold

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
    devices: Sequence[str] = DEVICES_TRIED,
    split: int | None = None,
    given: Account | None = None,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> WhatIf:
    """One knob at a time from the given run: accumulation, recomputation, precision, optimizer, device.

    Args:
        model: as for `preflop.account`; so are `batch` and every other option.
        devices: those to compare with.
        split: microbatches that the batch is cut into; None: two, where the batch is even.
        given: the account of the run as it is, where it was made already.
        progress: is told what is being priced.

    Raises:
        PreflopError: something about the arguments; the message says what to do.
    """
    for name in devices:
        find_device(name)
    prices = Accounts(model, batch, given, **options)
    if split is not None:
        check_split(prices.choice.batch, split)
    return plan_what_if(
        prices.choice, prices.price, devices=devices, split=split or SPLIT, progress=progress
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Formulas:
    """The operators of a step as formulas, and what the model calls its sizes."""

    rows: tuple[FormulaRow, ...]
    names: dict[str, int]
    """The model's sizes by name."""
    holds: str
    """Where the formulas hold, in words."""


def formulas(model: Any, batch: Any, **options: Any) -> Formulas:
    """The operators of a step as formulas in batch and sequence length.

    Args:
        model: a name of `preflop models` or a configuration; `batch` its sizes; the rest as for
            `preflop.account`.

    Raises:
        BadSubject: a model whose batch has no sizes to be written as letters.
        PreflopError: sizes of the step are no polynomials, or something about the arguments.
    """
    sizes = batch_sizes(batch) if isinstance(model, str) and batch is not None else None
    if sizes is None:
        raise BadSubject(
            "formulas need a batch whose sizes can be changed.\n"
            "  Name a model of `preflop models` or a config.json, with --batch (and --seq)."
        )
    target = find_device(options.pop("device", CPU), options.pop("alloc_conf", ""))
    microbatches = options.pop("microbatches", 1)
    name = _recorded_for(target)

    def subject_at(size: int, seq: int | None) -> Subject:
        chosen = {"batch_size": size} | ({} if seq is None else {"sequence_length": seq})
        return resolve(model, chosen, device=name, **options)

    facts = find(model) if known(model) else None
    subject = subject_at(*sizes)
    tapes = shipped_at_any_size(subject)
    if not any(tape.domain.holds(*sizes) for tape in tapes):
        regime = next(r for r in _regimes(facts) if r[1] is None or (sizes[1] or 0) <= r[1])
        try:
            tapes = _recorded(subject_at, [regime], has_sequence=sizes[1] is not None)
        except (NotPolynomial, Refused) as reason:
            raise BadSubject(f"{model} has no formulas in batch and sequence: {reason}.") from reason
    fitting = [tape for tape in tapes if tape.domain.holds(*sizes)]
    if not fitting:
        where = " or ".join(_domain_words(tape.domain) for tape in tapes)
        raise BadSubject(
            f"the formulas of {model} hold at {where}, and not at batch {sizes[0]}, sequence {sizes[1]}.\n"
            "  Ask at a size where they hold."
        )
    names = {} if facts is None else _size_names(facts)
    rows = formula_rows(Evaluator(fitting[0]).rows(microbatches), *sizes, names)
    return Formulas(tuple(rows), names, _domain_words(fitting[0].domain))


def _regimes(facts: ModelFacts | None) -> list[tuple[int, int | None]]:
    """(after, most): sequence lengths up to the window, and beyond it."""
    if facts is None:
        return [(0, None)]
    if facts.window is not None and facts.window < (facts.max_positions or 0):
        return [(0, facts.window), (facts.window, facts.max_positions)]
    return [(0, facts.max_positions)]


def _size_names(facts: ModelFacts) -> dict[str, int]:
    names = "hidden heads kv_heads head_dim ffn vocab max_positions patch_size classes".split()
    return {name: getattr(facts, name) for name in names if getattr(facts, name) is not None}


def _domain_words(domain: Domain) -> str:
    batch = f"B >= {domain.least_batch}" if domain.most_batch is None else f"B = {domain.most_batch}"
    if domain.least_seq is None:
        return batch
    most = "" if domain.most_seq is None else f" <= {domain.most_seq}"
    multiple = "" if domain.seq_multiple == 1 else f", a multiple of {domain.seq_multiple}"
    return f"{batch}, {domain.least_seq} <= S{most}{multiple}"
