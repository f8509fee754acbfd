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
from preflop.axes import KEYS, SEQ, Axis, axes_of_function, lengths_of, size_batch, sized_batch
from preflop.errors import BadSubject, described
from preflop.hardware.device import Device
from preflop.models.catalog import ModelFacts, find, known
from preflop.models.family import head_step, members, with_heads, with_layers
from preflop.plan.fit import Answer, Largest, Need, What, largest, largest_batch, need_of
from preflop.subject import Layers, Subject, is_config, resolve
from preflop.tape.events import Tape
from preflop.tape.stack import RECORDED, Refused, Stack
from preflop.tapes.choose import shipped_at_any_size
from preflop.timing.this import device_with_figures, recorded_as
from preflop.transforms.depth import deepen

# Deeper than any trained transformer by far; a tape holds every block's calls.
MOST_LAYERS = 2048
MOST_HEADS = 4096


def fit_model(
    model: Any,
    *,
    device: str,
    batch: int | None = None,
    what: Sequence[What] = tuple(What),
    alloc_conf: str = "",
    batch_from: Callable[..., Any] | None = None,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> list[Answer]:
    """For each kind, the largest that fits on the device where one more does not.

    Args:
        model: a name of `preflop models`; of a config.json, or a factory with `batch_from`, batch and lengths only.
        batch: held fixed for all but the batch; None: 1.
        batch_from: makes a factory's batch at any size (see `preflop.sized_batch`).
        what: the kinds; those that the model has none of are left out if all are asked for.
        alloc_conf: what PYTORCH_CUDA_ALLOC_CONF sets on the device.
        progress: is told what is being priced.
        options: lengths by the names of their axes (seq, source, target, frames), each held fixed for all but
            itself, by default as long as the model has positions; the rest as for `preflop.account`.

    Raises:
        PreflopError: something about the arguments; the message says what to do.
    """
    target = device_with_figures(device).with_alloc_conf(alloc_conf)
    lengths = {name: options.pop(name) for name in KEYS if options.get(name) is not None}
    rest = {name: value for name, value in options.items() if name not in KEYS}
    search = _Search(model, target, batch or 1, lengths, batch_from, rest, progress or (lambda words: None))
    kinds = [kind for kind in what if len(what) < len(What) or search.has(kind)]
    return [search.answer(kind) for kind in kinds]


class _Search:
    def __init__(
        self,
        model: Any,
        device: Device,
        batch: int,
        lengths: dict[str, int],
        batch_from: Callable[..., Any] | None,
        options: dict[str, Any],
        progress: Callable[[str], None],
    ) -> None:
        self.model, self.device, self.options, self.progress = model, device, options, progress
        self.batch, self.batch_from = batch, batch_from
        self.facts: ModelFacts | None = None
        self.axes = self._axes()
        self.name = model if isinstance(model, str) else getattr(model, "__qualname__", type(model).__name__)
        if SEQ not in lengths:
            lengths = {axis.name: axis.most for axis in self.axes if axis.most is not None} | lengths
        self.lengths = lengths_of(self.axes, lengths, self.name)

    def _axes(self) -> tuple[Axis, ...]:
        """What the model can be resized along, beside its batch.

        Raises:
            BadSubject: batches of other sizes cannot be made.
        """
        if self.batch_from is not None:
            return axes_of_function(self.batch_from)
        _check_sizes_can_change(self.model)
        if is_config(self.model):
            from preflop.huggingface import config_axes

            return config_axes(Path(self.model))
        self.facts = find(self.model)
        return () if self.facts.is_image else (Axis(SEQ, self.facts.max_positions),)

    def has(self, kind: What) -> bool:
        """Whether the model has such a size at all."""
        if kind.value in KEYS:
            return kind is What.BATCH or kind.value in [axis.name for axis in self.axes]
        if self.facts is None or (kind is What.WIDTH and self.facts.heads is None):
            return False
        return kind is What.MEMBER or self.facts.equal_blocks

    def answer(self, kind: What) -> Answer:
        """The largest of that kind that fits."""
        if kind.value in KEYS and kind is not What.BATCH:
            return self._longest(kind)
        return {
            What.BATCH: self._batch,
            What.DEPTH: self._depth,
            What.WIDTH: self._width,
            What.MEMBER: self._member,
        }[kind]()

    # -- sizes of the batch ----------------------------------------------------------------------

    def _batch(self) -> Answer:
        def need(batch: int) -> Need:
            return self._need(batch, self._subject(batch, self.lengths), f"a batch of {batch}")

        return Answer(What.BATCH, largest_batch(need), self._at(with_batch=False))

    def _longest(self, kind: What) -> Answer:
        names = [axis.name for axis in self.axes]
        if kind.value not in names:
            has = ", ".join(["batch", *names])
            raise BadSubject(f"{self.name} has no {kind.value} to search.\n  Leave it out of --what; it has: {has}.")
        index = names.index(kind.value)
        axis, words = self.axes[index], "sequence" if kind is What.SEQ else kind.value

        def need(length: int) -> Need:
            lengths = tuple(length if n == index else one for n, one in enumerate(self.lengths))
            return self._need(length, self._subject(self.batch, lengths), f"a {words} of {length}")

        found = largest(need, least=axis.least, step=axis.unit, most=axis.most, last_first=True)
        limit = "" if found.one_more is not None else f"{self.name} has {axis.most} positions"
        return Answer(kind, found, self._at(without=kind.value), limit)

    # -- sizes of the model ----------------------------------------------------------------------

    def _depth(self) -> Answer:
        facts = self._named(What.DEPTH)
        with_layers(facts, facts.layers)
        subject = self._subject(self.batch, self.lengths)
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
        subject = self._subject(self.batch, self.lengths)

        def need(heads: int) -> Need:
            member = with_heads(facts, heads)
            words = f"hidden size {member.hidden}"
            return self._need(heads, self._as(subject, member), words, said=words)

        found = largest(need, least=step, step=step, most=MOST_HEADS // step * step)
        limit = "" if found.one_more is not None else f"{MOST_HEADS} heads are the most that are tried"
        return Answer(What.WIDTH, found, self._at(), limit)

    def _member(self) -> Answer:
        facts = self._named(What.MEMBER)
        family = members(facts, self.lengths[0] if self.lengths else None)

        def need(number: int) -> Need:
            name = family[number - 1].name
            size = size_batch(self.axes, self.batch, self.lengths)
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

    def _subject(self, batch: int, lengths: tuple[int, ...]) -> Subject:
        if self.batch_from is None:
            made: Any = size_batch(self.axes, batch, lengths)
        else:
            named = {axis.name: length for axis, length in zip(self.axes, lengths)}
            made = sized_batch(self.batch_from, batch=batch, **named)
        return resolve(self.model, made, device=recorded_as(self.device), **self.options)

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
            if parametric.holds(self.batch, *self.lengths):
                return _whole_stack(parametric.at(self.batch, *self.lengths), parametric.stacks, facts.layers)
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

    def _at(self, *, with_batch: bool = True, without: str = "") -> str:
        parts = [f"batch {self.batch}"] if with_batch else []
        for axis, length in zip(self.axes, self.lengths):
            if axis.name != without:
                parts.append(f"{length} positions" if axis.name == SEQ else f"{axis.name} {length}")
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


def _check_sizes_can_change(model: Any) -> None:
    """Refuse what makes one batch, before it is taken for a misspelt name.

    Raises:
        BadSubject: a factory or a recording.
    """
    if isinstance(model, str) and model.endswith(".tape"):
        raise BadSubject(
            f"{model} is a recording of one size.\n  Fit needs a named model of `preflop models` or a config.json."
        )
    named = isinstance(model, str) and (known(model) or not (":" in model or model.endswith(".py")))
    if not named:
        raise BadSubject(
            f"{_words(model)} is a factory, and fit makes batches of other sizes itself.\n"
            "  Give --batch-from a function with parameters batch, seq, source, target or frames; or a "
            "named model or a config.json."
        )


def _words(model: Any) -> str:
    return model if isinstance(model, str) else described(model)
