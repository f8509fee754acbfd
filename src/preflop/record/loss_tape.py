"""Records a chunked loss alone, over a head of given sizes."""

from __future__ import annotations

from contextlib import nullcontext
from math import prod
from typing import Any

import torch

from preflop.models.chunked_loss import chunked_cross_entropy
from preflop.record.fake import INTEGER_LIMIT_BYTES
from preflop.record.recorder import Recorder
from preflop.record.target import target_rules
from preflop.subject import Subject
from preflop.tape.events import Role, Tape, TensorMeta
from preflop.tape.head import Head


def record_loss(subject: Subject, head: Head, *, chunks: int) -> Tape:
    """The tape of one forward and backward of the head and loss, in chunks, in the subject's precision.

    Storages are named "hidden", "weight", "bias", "labels", "slope" (the loss's own gradient) and "loss";
    gradients like what they belong to.
    """
    recorder = Recorder()
    with recorder:
        recorder.recording = False
        tensors = {
            name: _leaf(recorder, name, meta)
            for name, meta in (("hidden", head.hidden), ("weight", head.weight), ("bias", head.bias))
            if meta is not None
        }
        labels = _labels(recorder, head.labels)
        slope = recorder.kernels.empty((), (), torch.float32)
        for name, tensor in (*tensors.items(), ("labels", labels), ("slope", slope)):
            recorder.table.was_there(tensor, Role.INPUT, name)
        dtype = subject.precision.autocast_dtype
        autocast: Any = nullcontext() if dtype is None else torch.autocast("cpu", dtype=getattr(torch, dtype))
        with target_rules(subject, recorder):
            recorder.recording = True
            with autocast:
                loss = chunked_cross_entropy(
                    tensors["hidden"], tensors["weight"], labels, bias=tensors.get("bias"), chunks=chunks,
                    next_token=head.next_token,
                )  # fmt: skip
            _forward_ends(recorder, loss)
            loss.backward(slope)
            recorder.recording = False
        for name, tensor in tensors.items():
            recorder.table.set_role(tensor.grad, Role.GRADIENT, name)
        return recorder.tape(None, 1)


def _forward_ends(recorder: Recorder, loss: torch.Tensor) -> None:
    """What is alive now is kept for backward."""
    recorder.table.set_role(loss, Role.TEMPORARY, "loss")
    for number in recorder.table.alive.values():
        if recorder.table.storages[number].role is Role.TEMPORARY:
            recorder.table.storages[number].role = Role.ACTIVATION
    recorder.mark("forward_end")


def _leaf(recorder: Recorder, name: str, meta: TensorMeta) -> torch.Tensor:
    fake = recorder.kernels.empty(meta.shape, meta.stride, getattr(torch, meta.dtype))
    return fake.requires_grad_()


def _labels(recorder: Recorder, meta: TensorMeta) -> torch.Tensor:
    """Labels as a subject's batch has them: real where they are small."""
    if prod(meta.shape) * meta.itemsize > INTEGER_LIMIT_BYTES:
        return recorder.kernels.empty(meta.shape, meta.stride, torch.int64)
    return torch.zeros(meta.shape, dtype=torch.int64)
