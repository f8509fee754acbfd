"""The axes along which a step can be resized beside its batch: what they are called, and where they end.

A model's subject declares them: `seq` for tokens, `source` and `target` for an encoder and its decoder,
`frames` for sound, none for images.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from preflop.errors import BadSubject
from preflop.quantity import whole


@dataclass(frozen=True, slots=True)
class Axis:
    """One length of a step's inputs, and the lengths at which the step has one structure."""

    name: str
    """As in `tape.at(source=512)` and in formulas."""
    most: int | None = None
    """The longest there is; None where nothing ends it."""
    least: int = 1
    """The shortest there is."""
    after: int = 0
    """Lengths up to this have another structure (a window beyond which attention is masked)."""
    unit: int = 1
    """A convolution with strides sees steps of so many: sizes are polynomials in (length - rest) / unit."""
    rest: int = 0
    """What is left of the lengths that one fit holds for, divided by the unit."""

    @property
    def letter(self) -> str:
        """What formulas write for it.

        >>> Axis("seq").letter, Axis("source").letter, Axis("frames", unit=320).letter
        ('S', 'source', 'F')
        """
        if self.name == SEQ:
            return "S"
        return self.name if self.unit == 1 else self.name[0].upper()

    @property
    def words(self) -> str:
        """What the letter stands for.

        >>> Axis("frames", unit=320, rest=80).words
        '(frames - 80) / 320'
        """
        if self.unit == 1:
            return MEANING.get(self.name, self.name)
        return f"({self.name} - {self.rest}) / {self.unit}"

    def steps(self, length: int) -> int | None:
        """The length in units; None where the fit is of lengths that leave another rest."""
        steps, rest = divmod(length - self.rest, self.unit)
        return None if rest else steps

    def length(self, steps: int) -> int:
        """The inverse of `steps`."""
        return steps * self.unit + self.rest


BATCH, SEQ, SOURCE, TARGET, FRAMES = "batch", "seq", "source", "target", "frames"

KEYS = {
    BATCH: "batch_size", SEQ: "sequence_length", SOURCE: "source_length", TARGET: "target_length",
    FRAMES: "frames",
}  # fmt: skip
"""Axis -> its key in a batch of sizes, `{"batch_size": 8, "source_length": 512, "target_length": 128}`."""
OPTIONS = {
    BATCH: "--batch", SEQ: "--seq", SOURCE: "--source-seq", TARGET: "--target-seq", FRAMES: "--frames",
}  # fmt: skip
"""Axis -> its option on the command line."""
MEANING = {
    SEQ: "sequence length", SOURCE: "length of what the encoder reads", TARGET: "length of what the decoder reads",
    FRAMES: "samples of the sound",
}  # fmt: skip
# A sequence length says both lengths of an encoder and its decoder, where they are not given apart.
_ALSO = {SOURCE: SEQ, TARGET: SEQ}


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that a batch was asked for with."""

    batch: int
    lengths: Mapping[str, int]
    """By the name of their axis."""


@dataclass(frozen=True, slots=True)
class SizedBatch:
    """A batch that a function makes at any size. See `sized_batch`."""

    make: Callable[..., Any]
    sizes: Sizes
    axes: tuple[Axis, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Along each axis, in their order."""
        return lengths_of(self.axes, self.sizes.lengths, self.name)

    @property
    def name(self) -> str:
        """Of the function."""
        return getattr(self.make, "__qualname__", "batch")

    def __call__(self) -> Any:
        """The batch at its sizes."""
        lengths = {axis.name: length for axis, length in zip(self.axes, self.lengths)}
        return self.make(**{BATCH: self.sizes.batch}, **lengths)


def sized_batch(make: Callable[..., Any], *, batch: int, **lengths: int) -> SizedBatch:
    """A batch of your own at sizes that can be changed: for formulas, what-if, fit and choices.

    Args:
        make: makes the batch; its parameters are `batch` and any of `seq`, `source`, `target`, `frames`.
        batch: samples that one forward sees.
        lengths: of each axis.

    Returns:
        What `preflop.account` and the others take as a batch.

    Raises:
        BadSubject: a parameter or a length is none of these, or a length is missing.
        BadNumber: a size that is no whole number of at least 1.

    Example:
        >>> def sentences(batch, source, target):
        ...     return {"source": [[0] * source] * batch, "target": [[0] * target] * batch}
        >>> made = sized_batch(sentences, batch=2, source=3, target=1)()
        >>> made["source"]
        [[0, 0, 0], [0, 0, 0]]
    """
    sizes = Sizes(whole("batch", batch), {name: whole(name, length) for name, length in lengths.items()})
    found = SizedBatch(make, sizes, axes_of_function(make))
    _ = found.lengths
    return found


def takes_sizes(make: Callable[..., Any]) -> bool:
    """Whether a function that makes a batch has a parameter for its size.

    >>> takes_sizes(lambda batch, seq: None), takes_sizes(lambda: None)
    (True, False)
    """
    try:
        return BATCH in inspect.signature(make).parameters
    except (TypeError, ValueError):
        return False


def default_sizes(make: Callable[..., Any]) -> dict[str, int]:
    """The sizes that a function which makes a batch has by default, by axis.

    >>> default_sizes(lambda batch=64, seq=None: None)
    {'batch': 64}
    """
    defaults = {name: parameter.default for name, parameter in inspect.signature(make).parameters.items()}
    return {name: size for name, size in defaults.items() if type(size) is int}


def axes_of_function(make: Callable[..., Any]) -> tuple[Axis, ...]:
    """The axes that a function makes batches along: its parameters beside `batch`.

    Raises:
        BadSubject: it has no `batch`, or a parameter that is no size.
    """
    name = getattr(make, "__qualname__", "batch")
    names = [parameter.name for parameter in inspect.signature(make).parameters.values()]
    if BATCH not in names:
        raise BadSubject(
            f"{name} (--batch-from) makes a batch of one size.\n"
            "  Give it a parameter `batch`, and one for each length; a named model needs no --batch-from."
        )
    odd = [each for each in names if each not in KEYS]
    if odd:
        raise BadSubject(f"{name} has a parameter {odd[0]!r}, which is no size.\n  Sizes: {', '.join(KEYS)}.")
    return tuple(Axis(each) for each in names if each != BATCH)


def lengths_of(axes: Sequence[Axis], given: Mapping[str, int], who: str) -> tuple[int, ...]:
    """The length along each axis, in their order.

    Args:
        given: lengths by the name of their axis.
        who: whose axes these are, for the message.

    Raises:
        BadSubject: a length is missing, is not one of the model's, or is longer than the model runs.

    >>> lengths_of((Axis("source"), Axis("target")), {"seq": 64, "target": 8}, "t5")
    (64, 8)
    """
    used = {name for axis in axes for name in (axis.name, _ALSO.get(axis.name)) if name in given}
    unknown = [name for name in given if name not in used]
    if unknown:
        raise BadSubject(f"{who} has no {_with_option(unknown[0])}.\n  {_sizes_words(axes)}")
    found = []
    for axis in axes:
        length = given.get(axis.name, given.get(_ALSO.get(axis.name, axis.name)))
        if length is None:
            raise BadSubject(f"{who} needs a length for {_with_option(axis.name)}.\n  {_sizes_words(axes)}")
        if axis.most is not None and length > axis.most:
            raise BadSubject(
                f"{who} has {axis.most} positions along {_with_option(axis.name)}, and got a length of {length}.\n"
                f"  Give at most {axis.most}."
            )
        if length < axis.least:
            raise BadSubject(
                f"{who} needs {axis.least} along {_with_option(axis.name)} at least, and got a length of {length}."
            )
        found.append(length)
    return tuple(found)


def _with_option(name: str) -> str:
    return f"{name} ({OPTIONS[name]})" if name in OPTIONS else name


def _sizes_words(axes: Sequence[Axis]) -> str:
    names = ", ".join(_with_option(name) for name in (BATCH, *(axis.name for axis in axes)))
    return f"Its sizes: {names}."


def size_batch(axes: Iterable[Axis], batch: int, lengths: Iterable[int]) -> dict[str, int]:
    """The batch of sizes, as `preflop.account` takes it.

    >>> size_batch((Axis("seq"),), 8, (1024,))
    {'batch_size': 8, 'sequence_length': 1024}
    """
    return {KEYS[BATCH]: batch} | {KEYS[axis.name]: length for axis, length in zip(axes, lengths)}


def sizes_text(axes: Sequence[Axis], batch: int, lengths: Sequence[int], unit: str) -> str:
    """The sizes in words.

    Args:
        unit: what a sample without a length is.

    >>> sizes_text((Axis("seq"),), 8, (1024,), "samples"), sizes_text((), 8, (), "images")
    ('8 x 1024 tokens', '8 images')
    >>> sizes_text((Axis("source"), Axis("target")), 8, (512, 128), "samples")
    '8 x (512 source, 128 target)'
    """
    if not axes:
        return f"{batch} {unit}"
    if [axis.name for axis in axes] == [SEQ]:
        return f"{batch} x {lengths[0]} tokens"
    return f"{batch} x ({', '.join(f'{n} {axis.name}' for axis, n in zip(axes, lengths))})"
