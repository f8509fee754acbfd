"""The largest batch, sequence, depth, width and member of a family that fit, each priced whole.

May import: tapes, subject, models, plan, accounting, api, timing, transforms; record [torch] through `folding`, when
called.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from preflop.accounting import memory_of
from preflop.api import tape_of_subject
from preflop.errors import BadSubject
from preflop.hardware.device import Device
from preflop.models.catalog import ModelFacts, find, known
from preflop.models.family import head_step, members, with_heads, with_layers
from preflop.plan.fit import Answer, Largest, Need, What, largest, largest_batch, need_of
from preflop.subject import Layers, Subject, read_json, resolve
from preflop.tape.events import Tape
from preflop.tape.stack import RECORDED, Refused, Stack
from preflop.tapes.choose import shipped_at_any_size
from preflop.timing.this import device_with_figures, recorded_as
from preflop.transforms.depth import deepen

# Deeper than any trained transformer by far; a tape holds every block's calls.
MOST_LAYERS = 2048
MOST_HEADS = 4096


def fit_model(
    model: str,
    *,
    device: str,
    batch: int | None = None,
    seq: int | None = None,
    what: Sequence[What] = tuple(What),
    alloc_conf: str = "",
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> list[Answer]:
    """For each kind, the largest that fits on the device where one more does not.

    Args:
        model: a name of `preflop models`, or a config.json (batch and sequence only).
        batch: held fixed for all but the batch; None: 1.
        seq: held fixed for all but the sequence; None: as long as the model's positions.
        what: the kinds; those that the model has none of are left out if all are asked for.
        alloc_conf: what PYTORCH_CUDA_ALLOC_CONF sets on the device.
        progress: is told what is being priced.
        options: as for `preflop.account`.

    Raises:
        PreflopError: something about the arguments; the message says what to do.
    """
    target = device_with_figures(device).with_alloc_conf(alloc_conf)
    search = _Search(model, target, batch, seq, options, progress or (lambda words: None))
    kinds = [kind for kind in what if len(what) < len(What) or search.has(kind)]
    return [search.answer(kind) for kind in kinds]


class _Search:
    def __init__(
        self,
        model: str,
        device: Device,
        batch: int | None,
        seq: int | None,
        options: dict[str, Any],
        progress: Callable[[str], None],
    ) -> None:
        self.model, self.device, self.options, self.progress = model, device, options, progress
        _check_sizes_can_change(model)
        self.facts: ModelFacts | None = find(model) if known(model) or not _is_config(model) else None
        self.positions = self.facts.max_positions if self.facts else _positions(model)
        self.is_image = self.facts is not None and self.facts.is_image
        self.batch = batch or 1
        self.seq = None if self.is_image else seq or self.positions
        if self.is_image and seq is not None:
            raise BadSubject(f"{model} reads images and has no sequence: leave --seq out.")

    def has(self, kind: What) -> bool:
        """Whether the model has such a size at all."""
        if kind is What.BATCH:
            return True
        if kind is What.SEQ:
            return not self.is_image
        if self.facts is None or (kind is What.WIDTH and self.facts.heads is None):
            return False
        return kind is What.MEMBER or self.facts.equal_blocks

    def answer(self, kind: What) -> Answer:
        return {
            What.BATCH: self._batch,
            What.SEQ: self._seq,
            What.DEPTH: self._depth,
            What.WIDTH: self._width,
            What.MEMBER: self._member,
        }[kind]()

    # -- sizes of the batch ----------------------------------------------------------------------

    def _batch(self) -> Answer:
        def need(batch: int) -> Need:
            return self._need(batch, self._subject(batch, self.seq), f"a batch of {batch}")

        return Answer(What.BATCH, largest_batch(need), self._at(with_batch=False))

    def _seq(self) -> Answer:
        if self.is_image:
            raise BadSubject(f"{self.model} reads images and has no sequence: leave --what seq out.")

        def need(seq: int) -> Need:
            return self._need(seq, self._subject(self.batch, seq), f"a sequence of {seq}")

        found = largest(need, most=self.positions, last_first=True)
        limit = "" if found.one_more is not None else f"{self.model} has {self.positions} positions"
        return Answer(What.SEQ, found, f"batch {self.batch}", limit)

    # -- sizes of the model ----------------------------------------------------------------------

    def _depth(self) -> Answer:
        facts = self._named(What.DEPTH)
        with_layers(facts, facts.layers)
        subject = self._subject(self.batch, self.seq)
        cut = self._cut(subject)
        period = 1 if cut is None else cut[1].period

        def need(layers: int) -> Need:
            member = with_layers(facts, layers)
            instances = layers // period
            if cut is None or instances < RECORDED:
                return self._need(layers, self._as(subject, member), f"{layers} blocks")
            self.progress(f"pricing {layers} blocks of {self.model}")
            return self._priced(layers, deepen(cut[0], dataclasses.replace(cut[1], instances=instances)))

        first = RECORDED * period
        found = largest(need, least=first, step=period, most=MOST_LAYERS // period * period)
        if found.fits is None:
            fewer = largest(need, least=period, step=period, most=first - period)
            one_more = fewer.one_more or found.one_more
            found = Largest(fewer.fits, one_more, found.tried + fewer.tried)
        limit = "" if found.one_more is not None else f"{MOST_LAYERS} blocks are the most that are tried"
        return Answer(What.DEPTH, found, self._at(), limit)

    def _width(self) -> Answer:
        facts = self._named(What.WIDTH)
        step = head_step(facts)
        subject = self._subject(self.batch, self.seq)

        def need(heads: int) -> Need:
            member = with_heads(facts, heads)
            words = f"hidden size {member.hidden}"
            return self._need(heads, self._as(subject, member), words, said=words)

        found = largest(need, least=step, step=step, most=MOST_HEADS // step * step)
        limit = "" if found.one_more is not None else f"{MOST_HEADS} heads are the most that are tried"
        return Answer(What.WIDTH, found, self._at(), limit)

    def _member(self) -> Answer:
        facts = self._named(What.MEMBER)
        family = members(facts, self.seq)

        def need(number: int) -> Need:
            name = family[number - 1].name
            size = self._size(self.batch, self.seq)
            subject = resolve(name, size, device=recorded_as(self.device), **self.options)
            return self._need(number, subject, name, said=name)

        found = largest(need, most=len(family), last_first=True)
        limit = "" if found.one_more is not None else f"{family[-1].name} is the largest of its family"
        return Answer(What.MEMBER, found, self._at(), limit)

    # -- pricing ---------------------------------------------------------------------------------

    def _need(self, size: int, subject: Subject, words: str, *, said: str = "") -> Need:
        self.progress(f"pricing {words} of {self.model}" if not said else f"pricing {words}")
        return self._priced(size, tape_of_subject(subject), said)

    def _priced(self, size: int, tape: Tape, said: str = "") -> Need:
        return need_of(size, memory_of(tape, self.device), tape.parameters, words=said)

    def _subject(self, batch: int, seq: int | None) -> Subject:
        return resolve(self.model, self._size(batch, seq), device=recorded_as(self.device), **self.options)

    @staticmethod
    def _size(batch: int, seq: int | None) -> dict[str, int]:
        return {"batch_size": batch} | ({} if seq is None else {"sequence_length": seq})

    @staticmethod
    def _as(subject: Subject, facts: ModelFacts) -> Subject:
        """The same step of another member, which no name finds."""

        def build_layers(count: int) -> Any:
            return _build(dataclasses.replace(facts, layers=count))

        layers = Layers("blocks", facts.layers, build_layers)
        make_model = partial(_build, facts)
        return dataclasses.replace(subject, name=facts.name, make_model=make_model, layers=layers)

    def _cut(self, subject: Subject) -> tuple[Tape, Stack] | None:
        """The tape whose blocks are all of one stack, cut down, and that stack; None where there is none."""
        facts = self._named(What.DEPTH)
        for parametric in shipped_at_any_size(subject) if subject.microbatches == 1 else ():
            if parametric.domain.holds(self.batch, self.seq):
                return _whole_stack(parametric.at(self.batch, self.seq), parametric.stacks, facts.layers)
        from preflop.folding import PERIODS
        from preflop.record.subject_tape import record_cut

        for period in PERIODS:
            cut = record_cut(subject, period)
            found = _whole_stack(cut.tape, cut.stacks, facts.layers)
            if found is not None:
                return found
        return None

    def _named(self, kind: What) -> ModelFacts:
        if self.facts is None:
            raise BadSubject(
                f"{self.model} is no named model: the {kind.value} of its family is not known.\n"
                "  Ask for --what batch or seq, or name a model of `preflop models`."
            )
        if not self.has(kind):
            raise BadSubject(
                f"{self.facts.name} has no {kind.value} to search: its blocks differ.\n"
                "  Ask for --what batch or member."
            )
        return self.facts

    def _at(self, *, with_batch: bool = True) -> str:
        parts = [f"batch {self.batch}"] if with_batch else []
        if self.seq is not None:
            parts.append(f"{self.seq} positions")
        return ", ".join(parts)


def _whole_stack(tape: Tape, stacks: Sequence[Stack], layers: int) -> tuple[Tape, Stack] | None:
    """The tape and its stack, if the stack has all the blocks and they are proved to repeat."""
    if len(stacks) != 1 or stacks[0].first or stacks[0].instances * stacks[0].period != layers:
        return None
    try:
        deepen(tape, stacks[0])
    except Refused:
        return None
    return tape, stacks[0]


def _build(facts: ModelFacts) -> Any:
    from preflop.models.build import build

    return build(facts)


def _check_sizes_can_change(model: str) -> None:
    """Refuse what makes one batch, before it is taken for a misspelt name.

    Raises:
        BadSubject: a factory or a recording.
    """
    what = "a recording" if model.endswith(".tape") else "a factory" if ":" in model or model.endswith(".py") else ""
    if what and not known(model):
        raise BadSubject(
            f"{model} is {what}, and fit makes batches of other sizes itself: it needs a named model or a "
            "config.json.\n"
            "  Name a model of `preflop models`, or price the factory at one batch after another with "
            "`preflop account`."
        )


def _is_config(model: str) -> bool:
    path = Path(model)
    return path.is_dir() or path.suffix == ".json"


def _positions(model: str) -> int | None:
    """The longest sequence that a Hugging Face configuration allows; None where it does not say."""
    path = Path(model)
    fields = read_json(path / "config.json" if path.is_dir() else path)
    inner = fields.get("text_config") or fields
    found = inner.get("max_position_embeddings") or inner.get("n_positions")
    return found if isinstance(found, int) else None
