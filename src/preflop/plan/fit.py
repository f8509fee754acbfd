"""What fits: the largest model by the napkin, the largest batch by recorded peaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from preflop.account import Account
from preflop.errors import PreflopError
from preflop.formulas.model_memory import largest_parameters
from preflop.hardware.device import Device
from preflop.optimizers import OptimizerSpec
from preflop.precision import Precision
from preflop.quantity import require_positive


@dataclass(frozen=True, slots=True)
class LargestModel:
    """The most parameters whose weights, gradients and optimizer states fit. No activations."""

    device_id: str
    device_name: str
    gpus: int
    memory_bytes: int
    """Capacity as sold, of all GPUs together."""
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
        BadNumber: gpus is not positive.
    """
    require_positive(gpus=gpus)
    memory_bytes = gpus * device.memory_sold_bytes
    each = precision.bytes_per_parameter(optimizer.states_per_parameter)
    return LargestModel(
        device_id=device.id,
        device_name=device.name,
        gpus=gpus,
        memory_bytes=memory_bytes,
        optimizer=optimizer.name,
        precision=precision.name,
        parameter_bytes=precision.parameter_bytes,
        gradient_bytes=precision.gradient_bytes,
        optimizer_state_bytes=precision.state_bytes(optimizer.states_per_parameter),
        bytes_per_parameter=each,
        parameters=largest_parameters(memory_bytes, each),
        assumptions=_assumptions(gpus, optimizer),
    )


def _assumptions(gpus: int, optimizer: OptimizerSpec) -> tuple[str, ...]:
    said = ["no activations, temporaries, buffers or context: an upper bound", "capacity as sold"]
    if gpus > 1:
        said.append("weights, gradients and states split evenly over the GPUs (ZeRO-3, FSDP)")
    if optimizer.factored:
        said.append(f"{optimizer.name}'s row and column vectors of each matrix are not counted")
    return tuple(said)


@dataclass(frozen=True, slots=True)
class Need:
    """What a step of one batch needs on a device."""

    batch: int
    peak_bytes: int
    """Peak of the tensors alive."""
    spare_bytes: int
    """Usable memory minus what is needed (peak, allocator, context); negative: does not fit."""


def need_of_account(batch: int, account: Account) -> Need:
    """What an accounted step of that batch needs on the device it was accounted for.

    Raises:
        PreflopError: the account knows no device memory (a cpu), so that nothing can be said to fit.
    """
    if account.memory.spare_bytes is None:
        raise PreflopError(
            "the account has no device whose memory could be filled.\n"
            "  Needed: a device of `preflop hardware` with a known memory."
        )
    return Need(batch, account.memory.peak_bytes, account.memory.spare_bytes)


@dataclass(frozen=True, slots=True)
class LargestBatch:
    """The largest batch that fits, and what one more would need."""

    fits: Need | None
    """None: not even the smallest batch fits; `one_more` is then that batch."""
    one_more: Need
    recordings: int
    """Steps that were recorded to find it."""


# More samples than this on one device: the model's memory does not depend on its batch.
_LARGEST_BATCH = 2**30


def largest_batch(need_of: Callable[[int], Need]) -> LargestBatch:
    """The batch that fits where one more does not. Both are recorded, nothing is extrapolated.

    The next batch to record is guessed on the line through two known ones (peaks are nearly linear
    in the batch), so that few recordings are needed; a guess only chooses what is recorded next.

    Args:
        need_of: records a step with that batch.

    >>> found = largest_batch(lambda batch: Need(batch, 7 * batch, 100 - 7 * batch))
    >>> found.fits.batch, found.one_more.spare_bytes
    (14, -5)

    Raises:
        PreflopError: memory does not grow with the batch.
    """
    known: dict[int, Need] = {}

    def need(batch: int) -> Need:
        if batch not in known:
            known[batch] = need_of(batch)
        return known[batch]

    if need(1).spare_bytes < 0:
        return LargestBatch(None, need(1), len(known))
    fits, too_many = _bracket(need)
    halve = False
    while too_many - fits > 1:
        width = too_many - fits
        middle = (fits + too_many) // 2 if halve else _on_the_line(need(fits), need(too_many))
        for batch in (middle, middle + 1):
            if not fits < batch < too_many:
                continue
            if need(batch).spare_bytes >= 0:
                fits = batch
            else:
                too_many = batch
        halve = too_many - fits > width // 2
    return LargestBatch(need(fits), need(too_many), len(known))


def _bracket(need: Callable[[int], Need]) -> tuple[int, int]:
    """A batch that fits and a larger one that does not. 1 is known to fit."""
    fits, batch = 1, 2
    while need(batch).spare_bytes >= 0:
        if batch >= _LARGEST_BATCH:
            raise PreflopError(
                f"a batch of {batch} still fits: the model's memory does not grow with its batch.\n"
                "  Needed: a model whose first input dimension is the batch."
            )
        fits, batch = batch, min(_LARGEST_BATCH, max(2 * batch, _beyond(need(fits), need(batch))))
    return fits, batch


def _beyond(smaller: Need, larger: Need) -> int:
    """A batch a little more than the line through two that fit would allow."""
    each_bytes = (smaller.spare_bytes - larger.spare_bytes) // (larger.batch - smaller.batch)
    return larger.batch + larger.spare_bytes // each_bytes + 1 if each_bytes > 0 else 2 * larger.batch


def _on_the_line(fits: Need, too_many: Need) -> int:
    """The batch between two at which the line through them uses up the memory."""
    width = too_many.batch - fits.batch
    guess = fits.batch + fits.spare_bytes * width // (fits.spare_bytes - too_many.spare_bytes)
    return min(max(guess, fits.batch), too_many.batch - 1)
