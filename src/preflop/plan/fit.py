"""What fits: the largest model by the napkin; the largest batch, sequence, depth and width by whole steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod

from preflop.account import Memory
from preflop.errors import PreflopError
from preflop.formulas.model_memory import largest_parameters
from preflop.hardware.device import Device
from preflop.optimizers import OptimizerSpec
from preflop.precision import Precision
from preflop.quantity import require_positive
from preflop.tape.events import ParameterInfo


@dataclass(frozen=True, slots=True)
class LargestModel:
    """The most parameters whose weights, gradients and optimizer states fit. No activations."""

    device_id: str
    device_name: str
    gpus: int
    memory_bytes: int
    """Capacity as sold, of all GPUs together; of a calibrated machine, all that it has."""
    optimizer: str
    precision: str
    parameter_bytes: int
    """Per parameter, as the next three."""
    gradient_bytes: int
    optimizer_state_bytes: int
    """With the master copy where there is one."""
    bytes_per_parameter: int
    parameters: int
    assumptions: tuple[str, ...]


def largest_model(device: Device, gpus: int, optimizer: OptimizerSpec, precision: Precision) -> LargestModel:
    """The napkin: capacity as sold over bytes per parameter, nothing else in memory.

    >>> from preflop.hardware.catalog import find
    >>> from preflop.optimizers import find_optimizer
    >>> from preflop.precision import find_precision
    >>> largest_model(find("h100-sxm"), 8, find_optimizer("adamw"), find_precision("fp32")).parameters
    40000000000

    Raises:
        BadNumber: gpus is not positive. MissingFigure: fp8 on a device without it.
    """
    require_positive(gpus=gpus)
    if precision.fp8_linears:
        device.require_fp8()
    # A machine that was measured was not sold by a data sheet: its whole memory stands instead.
    sold = device.has_sold_capacity
    memory_bytes = gpus * (device.memory_sold_bytes if sold else device.memory_bytes)
    states, quantised = optimizer.states_per_parameter, optimizer.quantised
    each = precision.bytes_per_parameter(states, quantised=quantised)
    return LargestModel(
        device_id=device.id,
        device_name=device.name,
        gpus=gpus,
        memory_bytes=memory_bytes,
        optimizer=optimizer.name,
        precision=precision.name,
        parameter_bytes=precision.parameter_bytes,
        gradient_bytes=precision.gradient_bytes,
        optimizer_state_bytes=precision.state_bytes(states, quantised=quantised),
        bytes_per_parameter=each,
        parameters=largest_parameters(memory_bytes, each),
        assumptions=_assumptions(
            gpus, optimizer, memory_bytes, precision, "capacity as sold" if sold else device.memory_basis
        ),
    )


def _assumptions(
    gpus: int, optimizer: OptimizerSpec, memory_bytes: int, precision: Precision, basis: str
) -> tuple[str, ...]:
    said = ["no activations, temporaries, buffers or context: an upper bound", basis]
    if gpus > 1:
        said.append("weights, gradients and states split evenly over the GPUs (ZeRO-3, FSDP)")
    if optimizer.factored:
        said.append(f"{optimizer.name}'s row and column vectors of each matrix are not counted")
    if optimizer.quantised:
        said.append(
            f"{optimizer.name}'s absmax of each block (1.6 % of the states) and the fp32 states of small "
            "tensors are not counted"
        )
    if optimizer.matrices_only:
        fewer = largest_parameters(memory_bytes, precision.bytes_per_parameter())
        said.append(
            f"every parameter is {optimizer.name}'s; embeddings, head, norms and biases are AdamW's with two "
            f"states, down to {fewer:,} parameters if all were: `preflop fit MODEL` counts each"
        )
    if optimizer.in_backward:
        said.append("all gradients are counted, though an optimizer in backward frees them one by one")
    return tuple(said)


@dataclass(frozen=True, slots=True)
class Need:
    """What a step of one size needs on a device."""

    size: int
    """Of what is searched: samples, positions, blocks, heads; a place in a list of members."""
    peak_bytes: int
    """Peak of the tensors alive."""
    spare_bytes: int
    """Usable memory minus what is needed (peak, allocator, context); negative: does not fit."""
    parameters: int | None = None
    """Of the model, where the size is the model's."""
    words: str = ""
    """The size in words, where a number does not say it: a model's name, a width."""
    needs_bytes: int | None = None
    """What is held against the memory: what the allocator reserves, and the context; None: the peak alone."""
    gapless_spare_bytes: int | None = None
    """What would be to spare if the allocator left no gaps; None: as `spare_bytes`. It falls with the size, which
    `spare_bytes` does not always do."""

    @property
    def most_spare_bytes(self) -> int:
        """More cannot be to spare, whatever the allocator does."""
        return self.spare_bytes if self.gapless_spare_bytes is None else self.gapless_spare_bytes


def need_of(size: int, memory: Memory, parameters: Sequence[ParameterInfo], *, words: str = "") -> Need:
    """What a step of that size needs on the device it was priced for: what its allocator reserves, and
    the context, as `fits` says.

    Raises:
        PreflopError: there is no device memory (a cpu), so that nothing can be said to fit.
    """
    if memory.spare_bytes is None:
        raise PreflopError(
            "there is no device whose memory could be filled.\n"
            "  Needed: a device of `preflop hardware` with a known memory."
        )
    count = sum(prod(parameter.shape) for parameter in parameters)
    return Need(
        size, memory.peak_bytes, memory.spare_bytes, count, words, memory.needs_bytes, memory.gapless_spare_bytes
    )


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest size that fits, and what one more would need."""

    fits: Need | None
    """None: not even the smallest size fits; `one_more` is then that size."""
    one_more: Need | None
    """None: the largest that there is fits; `fits` is then that size."""
    tried: int
    """Steps that were priced to find it."""
    gap: Need | None = None
    """A smaller size that does not fit, for how the allocator places its blocks; None where none was met."""


# More samples than this on one device: the model's memory does not depend on its batch.
_LARGEST_BATCH = 2**30


def largest_batch(need_of: Callable[[int], Need]) -> Largest:
    """The batch that fits where one more does not.

    >>> found = largest_batch(lambda batch: Need(batch, 7 * batch, 100 - 7 * batch))
    >>> found.fits.size, found.one_more.spare_bytes
    (14, -5)

    Raises:
        PreflopError: memory does not grow with the batch.
    """
    found = largest(need_of, most=_LARGEST_BATCH)
    if found.one_more is None:
        raise PreflopError(
            f"a batch of {_LARGEST_BATCH} still fits: the model's memory does not grow with its batch.\n"
            "  Needed: a model whose first input dimension is the batch."
        )
    return found


def largest(
    need_of: Callable[[int], Need],
    *,
    least: int = 1,
    step: int = 1,
    most: int | None = None,
    last_first: bool = False,
) -> Largest:
    """The size that fits where the next does not. Both are priced whole, nothing is extrapolated.

    The next size to price is guessed on the line through two known ones (peaks are nearly linear), so
    that few are needed; a guess only chooses what is priced next.

    Args:
        need_of: prices a step of that size.
        least: the smallest size.
        step: from one size to the next.
        most: the largest size there is; None: no end.
        last_first: price the largest size first; if it fits, nothing else is asked.

    >>> largest(lambda n: Need(n, n * n, 50 - n * n), least=2, step=2, most=6).fits.size
    6
    """
    known: dict[int, Need] = {}

    def need(number: int) -> Need:
        if number not in known:
            known[number] = need_of(least + (number - 1) * step)
        return known[number]

    last = None if most is None else (most - least) // step + 1
    last_first = last_first and last is not None
    if last is not None and last_first and need(last).spare_bytes >= 0:
        return Largest(need(last), None, len(known))
    if need(1).spare_bytes < 0:
        return Largest(None, need(1), len(known))

    def spare(number: int) -> int:
        return need(number).spare_bytes

    fits, too_many = (1, last) if last_first else _bracket(spare, 1, last)
    if too_many is not None:
        fits, too_many = _boundary(spare, fits, too_many)
        fits, too_many = _beyond_gaps(spare, lambda number: need(number).most_spare_bytes, fits, too_many, last)
    gaps = [number for number in known if number < fits and spare(number) < 0]
    return Largest(
        need(fits), None if too_many is None else need(too_many), len(known), need(max(gaps)) if gaps else None
    )


Spare = Callable[[int], int]


def _bracket(spare: Spare, fits: int, last: int | None) -> tuple[int, int | None]:
    """A number that fits and a larger one that does not (None: the last one fits)."""
    number = fits + 1
    while last is None or fits < last:
        number = number if last is None else min(number, last)
        if spare(number) < 0:
            return fits, number
        fits, number = number, max(2 * number, _beyond(fits, spare(fits), number, spare(number)))
    return fits, None


def _beyond(smaller: int, one: int, larger: int, two: int) -> int:
    """A number a little more than the line through two that fit would allow."""
    each_bytes = (one - two) // (larger - smaller)
    return larger + two // each_bytes + 1 if each_bytes > 0 else 2 * larger


def _boundary(spare: Spare, fits: int, too_many: int) -> tuple[int, int]:
    """Two neighbours between the given numbers of which the one fits and the other does not."""
    halve = False
    while too_many - fits > 1:
        width = too_many - fits
        middle = (
            (fits + too_many) // 2 if halve else _on_the_line(fits, spare(fits), too_many, spare(too_many))
        )
        for number in (middle, middle + 1):
            if not fits < number < too_many:
                continue
            if spare(number) >= 0:
                fits = number
            else:
                too_many = number
        halve = too_many - fits > width // 2
    return fits, too_many


def _on_the_line(fits: int, one: int, too_many: int, two: int) -> int:
    """The number between two at which the line through them uses up the memory."""
    guess = fits + one * (too_many - fits) // (one - two)
    return min(max(guess, fits), too_many - 1)


# Sizes tried between the first that does not fit and the first whose blocks alone are too much.
_LOOKS = 16


def _beyond_gaps(
    spare: Spare, most: Spare, fits: int, too_many: int, last: int | None
) -> tuple[int, int | None]:
    """Larger neighbours of which the one fits, if there are any: the gaps that the allocator leaves depend on the
    sizes of blocks and do not grow evenly, so that a larger step may fit where a smaller one does not.

    Up to the size whose blocks alone are too much, at most `_LOOKS` sizes are tried, multiples of a power of two.

    Args:
        most: what would be to spare without gaps.
    """
    if most(too_many) < 0:
        return fits, too_many
    low, high = _bracket(most, too_many, last)
    end = low + 1 if high is None else _boundary(most, low, high)[1]
    stride = 1
    while (end - too_many) > stride * _LOOKS:
        stride *= 2
    upper = None if high is None else end
    looks = [end - 1] * (high is None) + list(range((end - 1) // stride * stride, too_many, -stride))
    for number in looks:
        if spare(number) >= 0:
            return (number, None) if upper is None else _boundary(spare, number, upper)
        upper = number
    return fits, too_many


class What(str, Enum):
    """What can be made as large as fits."""

    BATCH = "batch"
    SEQ = "seq"
    SOURCE = "source"
    TARGET = "target"
    FRAMES = "frames"
    DEPTH = "depth"
    WIDTH = "width"
    MEMBER = "member"


@dataclass(frozen=True, slots=True)
class Answer:
    """The largest of one kind that fits."""

    what: What
    found: Largest
    at: str
    """What was held fixed, in words: "batch 1, 1024 positions"."""
    limit: str = ""
    """Why there is nothing larger, where the largest that there is fits."""

