"""Records any call: `preflop.record(fn, ...)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from preflop.record.prepare import tensors_of
from preflop.record.recorder import Recorder
from preflop.tape.events import ParameterInfo, Role, Tape


def record_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tape:
    """The tape of `fn(*args, **kwargs)`, as one step. Nothing that existed before is changed."""
    recorder = Recorder()
    recorder.protect = True
    parameters: list[ParameterInfo] = []
    with recorder:
        if isinstance(fn, nn.Module):
            parameters = _enter(recorder, fn)
        for tensor in tensors_of((args, kwargs)):
            recorder.table.was_there(tensor, Role.INPUT)
        recorder.mark("step")
        result = record(recorder, fn, args, kwargs)
        recorder.mark("step_end")
        del result
        recorder.recording = False
        tape = recorder.tape(None, 1)
    tape.parameters = parameters
    return tape


def record(
    recorder: Recorder, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The frame at which the search for a call's origin stops (see `origin.FrameKind.LOOP`)."""
    del recorder
    return fn(*args, **kwargs)


def _enter(recorder: Recorder, model: nn.Module) -> list[ParameterInfo]:
    from preflop.record.subject_tape import _enter_model

    recorder.origins.name_modules(model)
    return _enter_model(recorder, model)
