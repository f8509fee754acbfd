"""Records an optimizer's updates alone, over parameters and gradients of given layouts."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from preflop.record.optimizers import InBackward, Named, assumptions_of, build_optimizer
from preflop.record.recorder import Recorder
from preflop.record.subject_tape import STEPS, name_states
from preflop.subject import Subject
from preflop.tape.events import ParameterInfo, Role, Tape, TensorMeta


def record_optimizer(
    subject: Subject, parameters: Sequence[ParameterInfo], gradients: Mapping[str, TensorMeta]
) -> Tape:
    """The tape of two updates by the subject's optimizer.

    Args:
        parameters: in the model's order.
        gradients: by parameter name, how each gradient lies in memory; a parameter without one is
            not updated.
    """
    recorder = Recorder()
    with recorder:
        recorder.recording = False
        named = {info.name: _parameter(recorder, info) for info in parameters}
        optimizer = build_optimizer(
            subject, [Named(info.name, info.module_type, named[info.name]) for info in parameters]
        )
        for text in assumptions_of(subject):
            recorder.assumed(text)
        for name, parameter in named.items():
            recorder.table.was_there(parameter, Role.PARAMETER, name)
        if optimizer is not None:
            for step in range(STEPS):
                recorder.step = step
                train_step(recorder, named, gradients, optimizer)
        return recorder.tape(None, STEPS)


def train_step(
    recorder: Recorder,
    named: dict[str, nn.Parameter],
    gradients: Mapping[str, TensorMeta],
    optimizer: torch.optim.Optimizer,
) -> None:
    """One update of gradients that are simply there; of an optimizer in backward, one for each."""
    if isinstance(optimizer, InBackward):
        for name in gradients:
            _give_gradients(recorder, named, {name: gradients[name]})
            _recorded(recorder, named, optimizer, partial(optimizer.update, named[name]))
    else:
        _give_gradients(recorder, named, gradients)
        _recorded(recorder, named, optimizer, optimizer.step)
    optimizer.zero_grad(set_to_none=True)
    gc.collect()


def _give_gradients(
    recorder: Recorder, named: dict[str, nn.Parameter], gradients: Mapping[str, TensorMeta]
) -> None:
    for name, meta in gradients.items():
        gradient = recorder.kernels.empty(meta.shape, meta.stride, getattr(torch, meta.dtype))
        named[name].grad = gradient
        recorder.table.was_there(gradient, Role.GRADIENT, name)


def _recorded(
    recorder: Recorder,
    named: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    update: Callable[[], Any],
) -> None:
    recorder.mark("backward_end")
    recorder.recording = True
    update()
    name_states(recorder, named.items(), optimizer)
    recorder.mark("optimizer_end")
    recorder.recording = False


def _parameter(recorder: Recorder, info: ParameterInfo) -> Any:
    stride: list[int] = []
    step = 1
    for size in reversed(info.shape):
        stride.insert(0, step)
        step *= max(size, 1)
    fake = recorder.kernels.empty(info.shape, tuple(stride), getattr(torch, info.dtype))
    fake.requires_grad_(info.trainable)
    fake._is_param = True
    return fake
