"""The account of this trainer's own step, and whether the run fits where it will run."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from preflop.accounting import Account, account_tape, find_device
from preflop.errors import BadFile, BadSubject, PreflopError, UnknownDevice
from preflop.folding import tape_of_many
from preflop.measure.verify import Verification, verify_subject
from preflop.models.catalog import ModelFacts
from preflop.precision import find_precision
from preflop.subject import Subject, resolve
from preflop.timing.this import THIS, calibration_path, other_threads, recorded_as, this_device
from preflop.trainer.config import TrainConfig
from preflop.trainer.model import make_model, trained_facts
from preflop.trainer.optimizer import make_optimizer
from preflop.trainer.step import clipped_norm
from preflop.trainer.tokens import open_data
from preflop.units import bytes_text


class DoesNotFit(PreflopError):
    """The run needs more memory than there is."""


@dataclass(frozen=True, slots=True)
class Room:
    """Memory that the step needs and that this machine has for it."""

    needed_bytes: int
    has_bytes: int | None
    """None where the machine does not say."""
    where: str

    @property
    def fits(self) -> bool:
        """True also where it is not known."""
        return self.has_bytes is None or self.needed_bytes <= self.has_bytes


def own_subject(config: TrainConfig, facts: ModelFacts, ranks: int, device_id: str) -> Subject:
    """One process's share of the trainer's step, as something to record: same model, loss, clipping, optimizer."""
    precision = find_precision(config.precision)
    dtype = getattr(torch, precision.parameter_dtype)
    # Where states are of another dtype the recorder asks for an optimizer per parameter: none sees all gradients,
    # and clipping, a thousandth of such a step, is not priced.
    clips = precision.state_dtype == precision.parameter_dtype and not precision.master_copy

    def batch() -> dict[str, torch.Tensor]:
        shape = (config.batch, config.seq)
        return {name: torch.zeros(shape, dtype=torch.int64) for name in ("input_ids", "labels")}

    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        held = list(parameters)
        made = make_optimizer(held, config)

        def clip(*step: object) -> None:
            del step
            clipped_norm(held, config.clip, foreach=True)

        if clips:
            made.register_step_pre_hook(clip)
        return made

    optimizer.__qualname__ = config.optimizer
    subject = resolve(
        lambda: make_model(facts, dtype, "none"),
        batch,
        optimizer=optimizer,
        precision=config.precision,
        microbatches=config.microbatches // ranks,
        recompute=config.recompute,
        device=device_id,
    )
    return dataclasses.replace(
        subject,
        name=facts.name,
        batch_text=f"{config.batch} x {config.seq} tokens",
        tokens=config.batch * config.seq,
    )


def own_account(config: TrainConfig, facts: ModelFacts, ranks: int, device: torch.device) -> Account:
    """What one step of this run costs one process, recorded before anything is built.

    Raises:
        PreflopError: the step cannot be recorded.
    """
    stale = stale_calibration()
    priced = find_device(device_name(device))
    subject = own_subject(config, facts, ranks, "cpu" if priced is None else recorded_as(priced))
    account = account_tape(tape_of_many(subject), priced)
    if stale is None:
        return account
    return dataclasses.replace(account, assumptions=(*account.assumptions, stale))


def verify_own_step(config: TrainConfig) -> Verification:
    """Two real steps of this run here, on the CPU, held against the prediction: peaks, phases, FLOPs.

    Raises:
        PreflopError: another device than the CPU was asked for, or the data or the step cannot be used.
    """
    if config.device == "cuda":
        raise BadSubject(
            "--verify runs two real steps on this machine's CPU, and device is cuda.\n"
            "  Leave --device out, or give --device cpu."
        )
    facts = trained_facts(config, open_data(config.data).vocab)
    return verify_subject(own_subject(config, facts, 1, "cpu"))


def device_name(device: torch.device) -> str:
    """The name of the device that this run is on: this machine, where it was calibrated; a GPU that is
    neither calibrated nor in the catalog is priced as a CPU. So is a machine whose calibration is stale."""
    calibrated = calibration_path().is_file() and stale_calibration() is None
    if calibrated and calibrated_type() == device.type:
        return THIS
    if device.type != "cuda":
        return "cpu"
    name = torch.cuda.get_device_name(device)
    try:
        find_device(name)
    except UnknownDevice:
        return "cpu"
    return str(name)


def stale_calibration() -> str | None:
    """Why this machine's calibration cannot be used, which costs a run its predicted times and nothing else;
    None where it can, or where there is none."""
    if not calibration_path().is_file():
        return None
    try:
        why = other_threads(torch.get_num_threads())
    except BadFile as error:
        why = f"{str(error).splitlines()[0]} `preflop calibrate` makes it anew"
    return None if why is None else f"no time is predicted: {' '.join(why.split())}"


def calibrated_type() -> str:
    """Which kind of device the calibration of this machine measured: "cpu" or "cuda"."""
    return "cpu" if recorded_as(this_device()) == "cpu" else "cuda"


def room(account: Account, device: torch.device) -> Room:
    """What the step needs beside what there is: free memory of the GPU, available memory of the machine."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        needed = account.memory.reserved_bytes or account.memory.peak_bytes
        return Room(
            needed, int(free), f"{torch.cuda.get_device_name(device)} has {bytes_text(int(free))} free"
        )
    free_bytes = _available_bytes()
    text = (
        "this machine does not say"
        if free_bytes is None
        else f"this machine has {bytes_text(free_bytes)} free"
    )
    return Room(account.memory.peak_bytes, free_bytes, text)


def check_room(found: Room, *, force: bool) -> None:
    """Refuse a run that does not fit.

    Raises:
        DoesNotFit: unless `force`.
    """
    if not found.fits and not force:
        raise DoesNotFit(
            f"the run does not fit: a step needs {bytes_text(found.needed_bytes)}, and {found.where}.\n"
            "  Use a smaller --batch or --seq (with more --microbatches), --recompute block, or start "
            "all the same with --force."
        )


def _available_bytes() -> int | None:
    """Memory that can be had without swapping.

    Source: Linux's own estimate, MemAvailable of /proc/meminfo.
    """
    try:
        with open("/proc/meminfo", encoding="ascii") as stream:
            rows: dict[str, Any] = dict(line.split(":", 1) for line in stream)
        return int(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass_on = getattr(os, "sysconf", None)
    try:
        return int(pass_on("SC_AVPHYS_PAGES")) * int(pass_on("SC_PAGE_SIZE")) if pass_on else None
    except (OSError, ValueError):
        return None
