"""A run from beginning to end: price it, build it or load it, step, evaluate, save, compare."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import preflop
from preflop.accounting import Account
from preflop.errors import BadSubject, PreflopError
from preflop.measure.allocations import peak_bytes
from preflop.measure.device import real_device
from preflop.measure.pages import keep_freed_memory
from preflop.measure.speed import Reference, pace
from preflop.measure.utilization import Meter, Reading
from preflop.models.initialise import initialise
from preflop.precision import LOST_SUMS, find_precision
from preflop.timing.this import THIS
from preflop.trainer import checkpoint, preflight, randomness, state
from preflop.trainer.batches import Microbatch, Plan, Windows, training_steps
from preflop.trainer.checkpoint import Checkpoints, Found, SaveFailed, Snapshot
from preflop.trainer.compare import Compared, compare, predicted
from preflop.trainer.config import TrainConfig, changes
from preflop.trainer.display import Display, Moment, Silent
from preflop.trainer.evaluate import evaluate
from preflop.trainer.folder import check_folder, locked, make_folder, save_config
from preflop.trainer.metrics import Metrics, Row
from preflop.trainer.model import make_model, trained_facts
from preflop.trainer.optimizer import make_optimizer
from preflop.trainer.processes import Processes, check_dealt, distribute, processes
from preflop.trainer.schedule import Scheduler, WarmupCosine
from preflop.trainer.signals import StopSignals
from preflop.trainer.step import Observer, StepOutcome, Training, train_step
from preflop.trainer.tokens import Data, open_data

_MEASURED_STEP = 3
"""Of this process: optimizer states exist, so its peak is that of a steady step. It warms up, too."""


class TrainingStopped(PreflopError):
    """The run cannot go on: too many steps without finite gradients, or parameters that are not finite."""


@dataclass(slots=True)
class Progress:
    """Where a run is: with the checkpoint's tensors and random states, all that the future depends on."""

    step: int = 0
    """Steps done, taken or skipped."""
    skipped: int = 0
    skipped_in_row: int = 0
    tokens: int = 0
    validation_loss: float | None = None
    """Of this step, where it was evaluated."""


@dataclass(frozen=True, slots=True)
class Result:
    """How a run ended."""

    step: int
    steps: int
    """What was asked for."""
    skipped: int
    loss: float | None
    """Of the last step; None where no step was left to do."""
    validation_loss: float | None
    """The last that was measured here."""
    reading: Reading
    compared: tuple[Compared, ...]
    account: Account | None
    stopped_by: str | None
    """The signal that ended it early."""

    def to_dict(self, run: Path) -> dict[str, Any]:
        """What `preflop train --json` prints."""
        return {
            "schema": "preflop.train/1",
            "run": str(run),
            "step": self.step,
            "steps": self.steps,
            "skipped": self.skipped,
            "loss": _number(self.loss),
            "validation_loss": _number(self.validation_loss),
            "stopped_by": self.stopped_by,
            "reading": asdict(self.reading),
            "compared": [asdict(row) for row in self.compared],
        }


def _number(value: float | None) -> float | None:
    """JSON has no NaN."""
    return value if value is not None and math.isfinite(value) else None


def _nothing(moment: str, step: int, microbatch: int) -> None:
    del moment, step, microbatch


def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    force: bool = False,
    price: bool = True,
    display: Display | None = None,
    observe: Observer = _nothing,
) -> Result:
    """Train, and leave RUN/config.toml, RUN/metrics.csv and RUN/checkpoints behind.

    Args:
        resume: go on from the newest valid checkpoint of the run's folder, or begin where there is none.
        force: start although the step does not fit.
        price: record the step first (needed for MFU and to refuse what does not fit).
        observe: called at each moment of the run, for tests and instruments.

    Raises:
        PreflopError: input that cannot be used, a run that does not fit, one that cannot go on.
    """
    device = real_device(None if config.device == "auto" else config.device)
    data = open_data(config.data)
    with processes(device) as joined:
        if device.type == "cuda":
            device = torch.device("cuda", joined.local_rank)
        else:
            keep_freed_memory()
        shown = display if display is not None and joined.first else Silent()
        with _Run(config, data, device, joined, shown, observe) as run:
            return run.go(resume=resume, force=force, price=price)


class _Run:
    """One process's part of a run. Its methods are the chapters, in order."""

    def __init__(
        self,
        config: TrainConfig,
        data: Data,
        device: torch.device,
        joined: Processes,
        display: Display,
        observe: Observer,
    ) -> None:
        self.config, self.data, self.device, self.processes = config, data, device, joined
        self.display, self.observe = display, observe
        self.facts = trained_facts(config, data.vocab)
        self.windows = Windows(data.train, config.seq, self.facts.needed("vocab"))
        enough = len(data.validation) > config.seq and config.evaluation_interval > 0
        self.validation = Windows(data.validation, config.seq, self.facts.needed("vocab")) if enough else None
        check_dealt(config.microbatches, joined.ranks)
        total = None if config.epochs is None else config.epochs * len(self.windows)
        self.plan = Plan(len(self.windows), config.batch, config.microbatches, config.seed, total)
        self.steps: int = config.steps or self.plan.steps or 0
        self.progress = Progress()
        self.peak_bytes: int | None = None
        self.last_validation: float | None = None

    def __enter__(self) -> _Run:
        self._matmul_precision = torch.get_float32_matmul_precision()
        if find_precision(self.config.precision).tf32:
            torch.set_float32_matmul_precision("high")
        return self

    def __exit__(self, *error: object) -> None:
        torch.set_float32_matmul_precision(self._matmul_precision)

    def go(self, *, resume: bool, force: bool, price: bool) -> Result:
        """The whole run."""
        if self.processes.first:
            check_folder(self.config, resume=resume)
        folder = Path(self.config.out)
        self.checkpoints = Checkpoints(
            folder,
            keep=self.config.keep,
            processes=self.processes,
            asynchronous=self.config.async_save,
            observe=lambda moment: self.observe(moment, self.progress.step, 0),
        )
        with ExitStack() as held:
            there = resume and folder.is_dir()
            if there:  # nobody else saves between this look at the checkpoints and the run
                held.enter_context(self._folder())
            found = self._found() if resume else None
            self.account = self._price(force=force) if price else None
            self.expected = predicted(self.account, self.plan.step_samples * self.config.seq)
            if not there:  # only now: a run that does not fit leaves no folder
                held.enter_context(self._folder())
            self._build()
            if found is not None:
                self._resume(found)
            if self.processes.first:
                self.checkpoints.clean()
                save_config(folder, self.config)
            self.metrics = self._open_metrics(folder)
            try:
                with StopSignals() as signals:
                    return self._train(signals)
            finally:
                self.display.stop()
                if self.metrics is not None:
                    self.metrics.close()

    # -- before -----------------------------------------------------------------------------------

    def _price(self, *, force: bool) -> Account | None:
        """The account, shown by the first process; every process learns whether the run fits."""
        account, problem = None, None
        if self.processes.first:
            account = preflight.own_account(self.config, self.facts, self.processes.ranks, self.device)
            self.display.account(account)
            try:
                preflight.check_room(preflight.room(account, self.device), force=force)
            except preflight.DoesNotFit as error:
                problem = error
        if problem is not None and self.processes.ranks == 1:
            raise problem
        if self.processes.any(problem is not None):
            raise problem or preflight.DoesNotFit("the run does not fit: see the first process.")
        return account

    @contextmanager
    def _folder(self) -> Iterator[None]:
        """The run's folder, made and locked by the first process."""
        if not self.processes.first:
            yield
            return
        with locked(make_folder(self.config)):
            yield

    def _build(self) -> None:
        """Model, optimizer, schedule and scaler, as at step 0."""
        config, precision = self.config, find_precision(self.config.precision)
        randomness.seed_all(config.seed, self.processes.rank)
        model = make_model(self.facts, getattr(torch, precision.parameter_dtype), config.recompute)
        initialise(model.model, config.seed)
        self.fingerprint = state.model_fingerprint(model)
        wrapped = distribute(model.to(self.device), config.shard, self.processes, self.device)
        if precision.scaled and config.shard == "fsdp" and self.processes.ranks > 1:
            raise BadSubject(
                "fp16-mixed needs one loss scale in all processes.\n  Use --shard ddp, or bf16-mixed."
            )
        if precision.parameter_dtype == "bfloat16" and config.microbatches > self.processes.ranks:
            self.display.say(f"Gradients are kept in bf16, and {LOST_SUMS}.")
        if config.shard == "fsdp" and self.processes.ranks == 1:
            self.display.say("shard is fsdp, and there is one process: it holds everything.")
        optimizer = make_optimizer(wrapped.parameters(), config)
        schedule = WarmupCosine(
            config.learning_rate, config.final_learning_rate_share, config.warmup_steps,
            config.decay_steps or self.steps,
        )  # fmt: skip
        autocast = precision.autocast_dtype
        self.training = Training(
            model=wrapped,
            optimizer=optimizer,
            scheduler=Scheduler(optimizer, schedule),
            scaler=torch.amp.GradScaler(self.device.type, enabled=precision.scaled),
            processes=self.processes,
            device=self.device,
            autocast_dtype=None if autocast is None else getattr(torch, autocast),
            clip=config.clip,
            seed=config.seed,
        )

    def _open_metrics(self, folder: Path) -> Metrics | None:
        if not self.processes.first:
            return None
        return Metrics(folder, after_step=self.progress.step, tensorboard=self.config.tensorboard)

    # -- the loop ---------------------------------------------------------------------------------

    def _train(self, signals: StopSignals) -> Result:
        """Steps until the end, a signal, or a reason to stop."""
        batches = training_steps(
            self.windows, self.plan, first_step=self.progress.step, rank=self.processes.rank,
            ranks=self.processes.ranks, workers=self.config.workers, pin=self.device.type == "cuda",
        )  # fmt: skip
        tokens = self.plan.step_samples * self.config.seq
        self.meter = Meter(
            self.account, tokens=tokens, devices=self.processes.ranks, warmup_steps=_MEASURED_STEP
        )
        self.training.model.train()
        self.meter.start()
        outcome: StepOutcome | None = None
        asked = False
        while self.progress.step < self.steps and not asked:
            outcome = self._step([batch.to(self.device) for batch in next(batches)])
            asked = self.processes.any(signals.name is not None)
        saved = self._save_last()
        reading = self.meter.reading()
        sharded = self.config.shard == "fsdp" and self.processes.ranks > 1
        on_gpu = self.device.type == "cuda"
        compared = compare(
            self.expected, reading, self.peak_bytes, on_gpu=on_gpu, sharded=sharded, pace=self._pace()
        )
        stopped_by = (signals.name or "a signal to another process") if asked else None
        result = Result(
            self.progress.step, self.steps, self.progress.skipped, outcome.loss if outcome else None,
            self.last_validation, reading, compared, self.account, stopped_by,
        )  # fmt: skip
        self.display.close(compared if outcome else (), _summary(result, saved=saved))
        return result

    def _pace(self) -> float | None:
        """How fast this machine is beside its calibration, where the step was priced by that."""
        if self.account is None or self.account.device is None or self.account.device.id != THIS:
            return None
        return pace([Reference(self.device).seconds()])

    def _step(self, batches: Sequence[Microbatch]) -> StepOutcome:
        """One step and what follows it: its row, perhaps an evaluation and a checkpoint."""
        begun, progress = time.perf_counter(), self.progress
        self.observe("step", progress.step, 0)
        outcome = self._measured(lambda: train_step(self.training, batches, progress.step, self.observe))
        self.meter.step(outcome.tokens)
        seconds = time.perf_counter() - begun
        progress.step += 1
        progress.tokens += outcome.tokens
        progress.skipped_in_row = 0 if outcome.taken else progress.skipped_in_row + 1
        progress.skipped += not outcome.taken
        progress.validation_loss = self._evaluated()
        self._record(outcome, batches, seconds)
        self.observe("step_end", progress.step, 0)
        if progress.skipped_in_row >= self.config.max_skipped:
            raise self._stopped(f"{progress.skipped_in_row} steps in a row had gradients that are not finite")
        every = self.config.checkpoint_every
        if every and progress.step % every == 0 and progress.step < self.steps:
            self._save_and_go_on()
        return outcome

    def _measured(self, step: Callable[[], StepOutcome]) -> StepOutcome:
        """The step; one of them with its peak memory read from the CPU allocator's own events."""
        self._seen = getattr(self, "_seen", 0) + 1
        if self.device.type == "cuda":
            outcome = step()
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device)
            return outcome
        if self._seen != _MEASURED_STEP or self.account is None:
            return step()
        held = state.held_bytes(self.training.model, self.training.optimizer)
        outcomes: list[StepOutcome] = []
        self.peak_bytes = held + peak_bytes(lambda: outcomes.append(step()))
        return outcomes[0]

    def _evaluated(self) -> float | None:
        """The validation loss, where this step is one to evaluate after."""
        every = self.config.evaluation_interval
        step = self.progress.step
        if self.validation is None or (step % every and step != self.steps):
            return None
        with self.meter.paused("evaluation"):
            loss = evaluate(
                self.training,
                self.validation,
                self.config.batch,
                self.config.evaluate_batches,
                step,
                self.observe,
            )
        self.last_validation = loss
        return loss

    def _record(self, outcome: StepOutcome, batches: Sequence[Microbatch], seconds: float) -> None:
        """The step's row, on disk and on the screen."""
        if self.metrics is None:
            return
        progress = self.progress
        scaler = self.training.scaler
        row = Row(
            step=progress.step,
            epoch=self.plan.consumed(progress.step - 1) // self.plan.windows,
            loss=outcome.loss,
            learning_rate=outcome.learning_rate,
            grad_norm=outcome.grad_norm,
            tokens=outcome.tokens,
            taken=int(outcome.taken),
            skipped=progress.skipped,
            tokens_per_s=self.meter.last_tokens_per_s,
            mfu=self.meter.last_mfu,
            peak_bytes=self.peak_bytes,
            seconds=seconds,
            scale=scaler.get_scale() if scaler.is_enabled() else None,
            validation_loss=progress.validation_loss,
            samples=self._drawn(batches),
        )
        self.metrics.write(row)
        self.display.step(Moment(row, self.steps, self.expected))

    def _drawn(self, batches: Sequence[Microbatch]) -> str:
        """A short name of the samples that the step drew: here, as they came; elsewhere, as dealt out."""
        mine = iter(batches)
        digest = hashlib.sha256()
        for index in range(self.plan.microbatches):
            dealt = self.plan.samples(self.progress.step - 1, index)
            if len(dealt):
                here = index % self.processes.ranks == self.processes.rank
                digest.update((next(mine).samples if here else dealt).tobytes())
        return digest.hexdigest()[:16]

    # -- checkpoints ------------------------------------------------------------------------------

    def _save_and_go_on(self) -> None:
        """Save; where that fails, say so and train on: the checkpoints before still stand."""
        try:
            self._save()
        except SaveFailed as error:
            self.display.say(f"NOT SAVED: {error}")

    def _save_last(self) -> bool:
        """The last checkpoint of the run, written before it ends.

        Raises:
            SaveFailed: it could not be written.
        """
        try:
            self.checkpoints.wait()
        except SaveFailed as error:
            self.display.say(f"NOT SAVED: {error}")
        if not self.config.checkpoint_every:
            return False
        stands = self.processes.first and self.checkpoints.has(self.progress.step)
        if not self.processes.any(stands):
            self._save()
            with self.meter.paused("saving"):
                self.checkpoints.wait()
        return True

    def _save(self) -> None:
        with self.meter.paused("saving"):
            if self.metrics is not None:
                self.metrics.flush()
            tensors = state.tensors_of(self.training.model, self.training.optimizer)
            bad = state.not_finite(tensors)
            if self.processes.any(bad is not None):
                raise self._stopped(f"{bad or 'a tensor of another process'} is not finite")
            self.checkpoints.save(self.progress.step, Snapshot(tensors, self._state(), randomness.capture()))

    def _stopped(self, why: str) -> TrainingStopped:
        begun = f"stopped at step {self.progress.step}: {why}.\n"
        if not self.checkpoints.has_any():
            return TrainingStopped(
                f"{begun}  No checkpoint was saved before.\n"
                "  Start anew with a lower --learning-rate, or in fp32 or bf16-mixed."
            )
        return TrainingStopped(
            f"{begun}  Nothing was saved after it went wrong: the checkpoints in {self.checkpoints.folder} are "
            "good.\n"
            "  Go on from the last with a lower --learning-rate, or in fp32 or bf16-mixed, and --resume."
        )

    def _state(self) -> dict[str, Any]:
        """Everything of a checkpoint that is not a tensor."""
        training = self.training
        return {
            "schema": checkpoint.SCHEMA,
            **asdict(self.progress),
            "epoch": self.plan.consumed(self.progress.step) // self.plan.windows,
            "samples": self.plan.consumed(self.progress.step),
            "scheduler": training.scheduler.state_dict(),
            "scaler": training.scaler.state_dict(),
            "config": asdict(self.config),
            "model": self.fingerprint,
            "data": self.data.fingerprint,
            "ranks": self.processes.ranks,
            "threads": torch.get_num_threads(),
            "versions": state.versions(preflop.__version__),
        }

    def _found(self) -> Found:
        """The newest valid checkpoint, if any, which is of this run. Asked before anything is priced or shown.

        Raises:
            PreflopError: all are damaged, or it is of another run, or has more steps done than are asked for.
        """
        found = self.checkpoints.find()
        if found.path is not None:
            self._check_settings(found.path, found.state)
            _check_made_with("other data", found.path, found.state["data"], self.data.fingerprint)
            self._check_not_beyond(found.state["step"])
        elif found.rejected:
            raise PreflopError(
                f"no checkpoint in {self.checkpoints.folder} can be used:\n  "
                + "\n  ".join(found.rejected)
                + "\n  Restore one from a copy, or start anew with another --out."
            )
        return found

    def _check_settings(self, path: Path, saved: dict[str, Any]) -> None:
        forbidden = changes(saved["config"], self.config).forbidden
        if forbidden:
            words = ", ".join(f"{one.key} was {one.before} and is {one.now}" for one in forbidden)
            raise PreflopError(
                f"{path} is of another run: {words}.\n  Resume with the settings it was made with "
                "(leave them out: they stand in the run's config.toml), or start anew with another --out."
            )

    def _check_not_beyond(self, done: int) -> None:
        """More steps than are done must be asked for; as many is nothing to do, and no error."""
        if done > self.steps:
            raise PreflopError(
                f"{self.config.out} has {done} steps done, which is beyond the {self.steps} "
                "asked for.\n  Go on with more --steps, or start anew with another --out."
            )

    def _resume(self, found: Found) -> None:
        """Go on from the checkpoint that was found; say which were rejected, and why.

        Raises:
            PreflopError: it was made with another model of that name.
        """
        for sentence in found.rejected:
            self.display.say(f"Rejected checkpoint {sentence}.")
        if found.path is None:
            self.display.say(f"No checkpoint in {self.checkpoints.folder}: starting at step 0.")
            return
        _check_made_with("another model", found.path, found.state["model"], self.fingerprint)
        self._tell_changes(found.state)
        self._load(found.path, found.state)
        self.display.say(f"Resumed from {found.path.name}.")

    def _tell_changes(self, saved: dict[str, Any]) -> None:
        """What is not as it was, and may be so."""
        for one in changes(saved["config"], self.config).allowed:
            self.display.say(f"Changed since the checkpoint: {one.key} was {one.before} and is {one.now}.")
        if saved["threads"] != torch.get_num_threads() or saved["ranks"] != self.processes.ranks:
            self.display.say(
                f"The checkpoint was made by {saved['ranks']} processes of {saved['threads']} threads, "
                f"here are {self.processes.ranks} of {torch.get_num_threads()}: sums may round otherwise."
            )

    def _load(self, path: Path, saved: dict[str, Any]) -> None:
        """Tensors, counters and random states, as they were when they were saved."""
        training = self.training
        into = state.room_for(checkpoint.saved_tensors(path), training.model, training.optimizer)
        checkpoint.load_tensors(path, into, self.processes)
        state.set_optimizer_states(into, training.model, training.optimizer)
        training.scheduler.load_state_dict(saved["scheduler"])
        training.scaler.load_state_dict(saved["scaler"])
        self.progress = Progress(**{name: saved[name] for name in asdict(Progress())})
        random = checkpoint.read_random(path, self.processes.rank)
        if random is None:
            self.display.say("This process is new to the run: its random states begin anew.")
            return
        for sentence in randomness.restore(random):
            self.display.say(f"Not restored: {sentence}.")


def _check_made_with(other: str, path: Path, saved: str, mine: str) -> None:
    if saved != mine:
        raise PreflopError(
            f"{path} was made with {other}.\n"
            "  Resume with what the run began with, or start anew with another --out."
        )


def _summary(result: Result, *, saved: bool) -> str:
    if result.loss is None and not result.stopped_by:
        return f"Nothing to do: step {result.step} of {result.steps} was done before."
    end = f"Stopped by {result.stopped_by} at" if result.stopped_by else "Done:"
    parts = [f"{end} step {result.step} of {result.steps}"]
    if result.loss is not None:
        parts.append(f"loss {result.loss:.4f}")
    if result.validation_loss is not None:
        parts.append(f"validation {result.validation_loss:.4f}")
    if result.skipped:
        parts.append(f"{result.skipped} steps skipped (gradients not finite)")
    if result.reading.tokens_per_s is not None:
        parts.append(str(result.reading))
    parts.append(
        "saved; go on with --resume" if result.stopped_by and saved else "saved" if saved else "not saved"
    )
    return ", ".join(parts) + "."
