"""Records a subject: builds it on fake tensors and runs two steps of the contract's loop."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from preflop.errors import BadSubject, PreflopError
from preflop.recomputation import alike
from preflop.record import prepare
from preflop.record.eager import compiled_words
from preflop.record.fake import way_out
from preflop.record.fold import LEAST_SAVED, Fold, cut
from preflop.record.fp8 import convert_linears
from preflop.record.loop import default_loss, loss_assumption, train_step
from preflop.record.one_of_each import OneOfEach, for_all, seen_in_part
from preflop.record.optimizers import InBackward, assumptions_of, build_optimizer, named_parameters
from preflop.record.recompute import apply_recompute, repeated_blocks, without_cache
from preflop.record.recorder import Recorder
from preflop.record.target import target_rules
from preflop.subject import FAILURES, Subject, users_error
from preflop.tape.events import ParameterInfo, Role, SubjectInfo, Tape
from preflop.tape.stack import RECORDED, CutTape, Refused, Stack
from preflop.units import AVX2_BYTES, AVX512_BYTES

STEPS = 2
"""The first makes the optimizer's states, the second is the steady state."""


def record_subject(subject: Subject, *, lives: bool = False) -> Tape:
    """The tape of two optimizer steps of the subject, every call recorded.

    Args:
        lives: annotate it with what held each tensor (see `tape.lives`), for `transforms.recompute`.

    Raises:
        PreflopError: the subject cannot be built or run; its own error is given once.
        Refused: with `lives`, something was seen that the notes cannot say.
    """
    return _record(subject, [], [], lives=lives)


def record_real(subject: Subject) -> Tape:
    """The tape of two real steps of the subject on this CPU, on copies: memory and arithmetic are real.

    Raises:
        PreflopError: the subject cannot be built or run here; its own error is given once.
    """
    return _record(subject, [], [], real=True)


def record_cut(subject: Subject, least_period: int = 1, *, lives: bool = False) -> CutTape:
    """As `record_subject`, of the model with each stack of equal blocks cut down to a few.

    Args:
        least_period: see `fold.cut`.
        lives: see `record_subject`.

    Raises:
        PreflopError: as `record_subject`; also where only the cut model does not run.
    """
    layers = subject.layers
    if layers is not None and alike(subject.recompute):
        instances, rest = divmod(layers.count, least_period)
        if rest == 0 and instances >= RECORDED + LEAST_SAVED:
            fewer = dataclasses.replace(
                subject, make_model=partial(layers.build, RECORDED * least_period)
            )
            stack = Stack(layers.path, 0, least_period, instances)
            return CutTape(_record(fewer, [], [], lives=lives), (stack,), ())
    folds: list[Fold] = []
    reasons: list[str] = []
    tape = _record(subject, folds, reasons, least_period=least_period, lives=lives)
    return CutTape(tape, tuple(fold.stack for fold in folds), tuple(reasons))


def _record(
    subject: Subject,
    folds: list[Fold],
    reasons: list[str],
    *,
    least_period: int | None = None,
    lives: bool = False,
    real: bool = False,
) -> Tape:
    """One recording. With `least_period`, stacks are cut: what was cut, and why something was not, go
    into the lists. With `real`, nothing is fake."""
    if not lives and not real:
        try:
            return _recorded(subject, folds, reasons, least_period=least_period, in_part=True)
        except Refused:
            folds.clear()
            reasons.clear()
    return _recorded(subject, folds, reasons, least_period=least_period, lives=lives, real=real)


def _recorded(
    subject: Subject,
    folds: list[Fold],
    reasons: list[str],
    *,
    least_period: int | None,
    lives: bool = False,
    real: bool = False,
    in_part: bool = False,
) -> Tape:
    """As `_record`; with `in_part`, of updates that are alike one is recorded for all (`one_of_each`).

    Raises:
        Refused: with `in_part`, the others do not follow; with `lives`, notes cannot say what was seen.
    """
    recorder = Recorder(lives=lives)
    recorder.real = real
    with recorder:
        recorder.recording = False
        model = prepare.real_model(subject) if real else prepare.fake_model(subject, recorder)
        if subject.precision.fp8_linears:
            convert_linears(model, subject, recorder)
        apply_recompute(model, subject.recompute)
        if recorder.lives is not None:
            without_cache(model)
            recorder.lives.wrap(model, repeated_blocks(model))
        if least_period is not None:
            cut_down, left = cut(model, least_period)
            folds.extend(cut_down)
            reasons.extend(left)
        batch = prepare.real_batch(subject) if real else prepare.fake_batch(subject, recorder.kernels)
        if (empty := prepare.empty_assumption(batch)) is not None:
            recorder.assumed(empty)
        recorder.origins.name_modules(model)
        for words in compiled_words(model):
            recorder.assumed(words)
        try:
            named = named_parameters(model)
            optimizer = build_optimizer(subject, named)
            if in_part:
                optimizer = seen_in_part(subject, optimizer, named)
        except PreflopError:
            raise
        except FAILURES as error:
            raise users_error("making the optimizer", error) from error
        if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
            recorder.assumed(
                "TorchScript's executor may hold tensors of a scripted module for longer than its calls need them: "
                "their memory is priced by the calls"
            )
        for text in assumptions_of(subject):
            recorder.assumed(text)
        parameters = _enter_model(recorder, model)
        if isinstance(optimizer, InBackward):
            optimizer.gradient_is_there = partial(_name_gradient, recorder, _names(model))
        wanting = [info for info in parameters if info.trainable]
        if not wanting and not any(tensor.requires_grad for tensor in prepare.tensors_of(batch)):
            recorder.assumed("nothing in the model is trainable: the step priced is a forward without backward")
        for tensor in prepare.tensors_of(batch):
            recorder.table.was_there(tensor, Role.INPUT)
        recorder.recording = True
        with target_rules(subject, recorder):
            _run(recorder, subject, model, batch, optimizer)
        recorder.recording = False
        info = _subject_info(subject, batch)
        tape = recorder.tape(info, STEPS)
    tape.parameters = parameters
    return for_all(tape, optimizer.picked) if isinstance(optimizer, OneOfEach) else tape


def _run(
    recorder: Recorder,
    subject: Subject,
    model: nn.Module,
    batch: Any,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    precision = subject.precision
    autocast = None if precision.autocast_dtype is None else getattr(torch, precision.autocast_dtype)
    scaler = torch.amp.GradScaler("cpu") if precision.scaled else None

    def stated_loss(output: Any) -> torch.Tensor:
        assumed = loss_assumption(output)
        if assumed is not None:
            recorder.assumed(assumed)
        return default_loss(output)

    def observe(name: str, microbatch: int) -> None:
        _observe(recorder, model, optimizer, name, microbatch)

    hooks = nullcontext() if recorder.lives is None else recorder.lives.hooks()
    for step in range(STEPS):
        recorder.step = step
        try:
            with hooks:
                train_step(
                    model,
                    batch,
                    subject.loss or stated_loss,
                    optimizer,
                    autocast_dtype=autocast,
                    scaler=scaler,
                    microbatches=subject.microbatches,
                    keep_output=subject.keep_output,
                    observe=observe,
                )
        except PreflopError:
            raise
        except FAILURES as error:
            doing = f"running the step with the batch {prepare.batch_text(batch) or '()'}"
            raise BadSubject(f"{users_error(doing, error)}{way_out(error)}") from error


def _observe(
    recorder: Recorder,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    name: str,
    microbatch: int,
) -> None:
    """Learn roles at the moments when they are known, and mark the moment."""
    recorder.microbatch = microbatch
    if name == "microbatch":
        return
    if name == "forward_end":
        _activations(recorder)
    elif name == "backward_end":
        for path, parameter in model.named_parameters():
            if parameter.grad is not None:
                recorder.table.set_role(parameter.grad, Role.GRADIENT, path)
    elif name == "optimizer_end" and optimizer is not None:
        name_states(recorder, model.named_parameters(), optimizer)
    recorder.mark(name)


def _names(model: nn.Module) -> dict[torch.Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _name_gradient(recorder: Recorder, names: dict[torch.Tensor, str], parameter: nn.Parameter) -> None:
    recorder.table.set_role(parameter.grad, Role.GRADIENT, names[parameter])


def _activations(recorder: Recorder) -> None:
    """What forward made and is alive when it ends is kept for backward."""
    for number in recorder.table.living():
        storage = recorder.table.storages[number]
        if storage.role is Role.TEMPORARY:
            storage.role = Role.ACTIVATION


def name_states(
    recorder: Recorder,
    named: Iterable[tuple[str, torch.Tensor]],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Optimizer states, named "parameter.state"; one that several parameters share, "state"."""
    names = {parameter: name for name, parameter in named}
    uses = Counter(id(value) for state in optimizer.state.values() for value in state.values())

    def walk(value: Any, name: str) -> None:
        if isinstance(value, torch.Tensor):
            shared = uses[id(value)] > 1
            recorder.table.set_role(
                value, Role.OPTIMIZER_STATE, name.rpartition(".")[2] if shared else name
            )
        elif isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{name}.{key}" if name else str(key))
        elif isinstance(value, (list, tuple)):
            for item in value:
                walk(item, name)

    for parameter, state in optimizer.state.items():
        walk(state, names.get(parameter, ""))


def _enter_model(recorder: Recorder, model: nn.Module) -> list[ParameterInfo]:
    infos = []
    for one in named_parameters(model):
        parameter = one.parameter
        number = recorder.table.was_there(parameter, Role.PARAMETER, one.name)
        dtype = str(parameter.dtype).removeprefix("torch.")
        infos.append(
            ParameterInfo(
                one.name, tuple(parameter.shape), dtype, parameter.requires_grad, number, one.holder
            )
        )
    for name, buffer in model.named_buffers():
        recorder.table.was_there(buffer, Role.BUFFER, name)
    return infos


def _subject_info(subject: Subject, batch: Any) -> SubjectInfo:
    samples, tokens = prepare.count_samples(batch)
    return SubjectInfo(
        model=subject.name,
        precision=subject.precision.name,
        optimizer=subject.optimizer_name,
        microbatches=subject.microbatches,
        recompute=subject.recompute_name,
        batch=subject.batch_text or prepare.batch_text(batch),
        tokens=subject.tokens if subject.tokens is not None else tokens,
        samples=samples,
        device=subject.device,
        torch_version=torch.__version__,
        cpu_threads=torch.get_num_threads(),
        cpu_vector_bytes=vector_bytes_here() if subject.device == "cpu" else AVX512_BYTES,
    )


def vector_bytes_here() -> int:
    """Width of a vector register of this machine's CPU: what oneDNN builds its layouts for.

    Of another instruction set than AVX2, the rules of AVX-512 are taken.
    """
    return AVX2_BYTES if torch.backends.cpu.get_cpu_capability() == "AVX2" else AVX512_BYTES


__all__ = ["BadSubject", "record_subject"]
