"""The public functions. `import preflop` names them; each imports torch only when it is called."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from preflop.errors import BadSubject, described
from preflop.recomputation import parse
from preflop.tape.events import Tape

if TYPE_CHECKING:
    from preflop.account import Account
    from preflop.measure.verify import Verification
    from preflop.subject import Subject


def account(
    model: Any,
    batch: Any = None,
    *,
    loss: Callable[[Any], Any] | None = None,
    optimizer: Any = "adamw",
    precision: str = "fp32",
    microbatches: int = 1,
    recompute: Any = "none",
    keep_output: bool = False,
    device: str = "cpu",
    gpus: int = 1,
    shard: str = "none",
    alloc_conf: str = "",
) -> Account:
    """What one training step costs: memory, FLOPs, bytes moved and time.

    Records two optimizer steps on fake tensors and reads every ledger off the tape.

    Args:
        model: an `nn.Module` (never changed), a callable that builds one, a name from
            `preflop models`, "package.module:factory", "path/file.py:factory", or a folder or file
            with a Hugging Face config.json.
        batch: what one forward sees: a tensor, a tuple (positional) or a mapping (keyword) of tensors,
            or a callable that makes one; with a named model
            `{"batch_size": 8, "sequence_length": 1024}`; a configured encoder with a decoder has
            `source_length` and `target_length`, sound `frames`; `sized_batch` for one of your own.
        loss: from the model's output to a scalar. Default: `.loss` of the output, the output if it is
            a scalar, else its mean in fp32.
        optimizer: a name, a callable from parameters to an `Optimizer`, or None.
        precision: "fp32", "tf32", "bf16-mixed", "fp16-mixed", "fp8", "bf16", "bf16-fp32-states" or
            "bf16-master".
        microbatches: how many batches make one optimizer step.
        recompute: "none", "block", "selective", or a callable from module name to bool.
        keep_output: keep the output to the end of its microbatch, as loops that log it do.
        device: a name from `preflop hardware`, "cpu", or "this": this machine, once calibrated.
        alloc_conf: what PYTORCH_CUDA_ALLOC_CONF sets on a CUDA device, as "expandable_segments:True".
        gpus: over how many devices the step is shared, each with a batch as given; then `shard` says how.
        shard: "none", "ddp" (DistributedDataParallel), "fsdp" (fully_shard, block by block) or "zero2" (the same,
            weights whole from forward to backward). The account is rank 0's.

    Returns:
        The account; `.show()` prints it, `.to_dict()` is the contract's JSON.

    Raises:
        PreflopError: something about the arguments; the message says what to do.

    Example:
        >>> import torch, preflop
        >>> step = preflop.account(torch.nn.Linear(8, 4, bias=False), torch.randn(3, 8))
        >>> step.flops.model                        # forward 2*3*8*4, weight gradient as much again
        384
    """
    from preflop.accounting import account_tape, find_device
    from preflop.sharing import parse as parse_sharing
    from preflop.subject import resolve
    from preflop.timing.this import recorded_as

    target = find_device(device, alloc_conf)
    sharing = parse_sharing(gpus, shard)
    subject = resolve(
        model, batch, loss=loss, optimizer=optimizer, precision=precision, microbatches=microbatches,
        recompute=recompute, keep_output=keep_output, device=recorded_as(target) if target else "cpu",
    )
    return account_tape(sharing.applied(tape_of_subject(subject)), target)


def account_real(
    model: Any, batch: Any = None, *, device: str = "cpu", alloc_conf: str = "", **options: Any
) -> Account:
    """`account` for a model that cannot be recorded on fake tensors: from real steps on this CPU.

    A batch and sequence that are small are run as they are. Larger ones are read off a fit through small
    ones, and refused where the step's sizes are no polynomials in batch and sequence. The account's
    assumptions say that it was made like this.

    Args:
        device: where the counts are priced. The operators are those that the CPU runs.
        alloc_conf: as for `account`.
        options: as for `account`.

    Raises:
        PreflopError: something about the arguments; a step that does not run here, or does not scale.

    Example:
        >>> import torch, preflop
        >>> step = preflop.account_real(torch.nn.Linear(8, 4, bias=False), torch.randn(3, 8))
        >>> step.flops.model
        384
    """
    from preflop.accounting import account_tape, find_device
    from preflop.real_steps import tape_of_real

    return account_tape(tape_of_real(model, batch, options), find_device(device, alloc_conf))


def tape_of_subject(subject: Subject) -> Tape:
    """The subject's tape: shipped with the package where there is one, else recorded now."""
    tape = shipped_of(subject)
    if tape is None:
        from preflop.folding import tape_of_many

        tape = tape_of_many(subject)
    _check_called(subject, tape)
    if subject.assumptions:
        tape = dataclasses.replace(tape, assumptions=[*tape.assumptions, *subject.assumptions])
    return tape


_NEVER_CALLED = ("ModuleList", "ModuleDict")
"""Classes of torch that hold modules and have no forward."""


def _check_called(subject: Subject, tape: Tape) -> None:
    """Refuse to run again what does not run: a list of blocks, where its members were meant."""
    wanted = parse(subject.recompute)
    if wanted is None or wanted.chosen is None:
        return
    types = dict(zip(tape.modules, tape.module_types, strict=True))
    found = wanted.of_modules(tape.modules)
    if all(types[name] in _NEVER_CALLED for name in found):
        raise BadSubject(
            f"recompute {wanted.words!r} is {found[0]}, an nn.{types[found[0]]}, which is never called itself.\n"
            f"  Name its members: '{found[0]}.*'."
        )


def shipped_of(subject: Subject) -> Tape | None:
    """The subject's tape where one ships, its microbatches repeated, which named models are tested to do
    exactly; None where it must be recorded."""
    from preflop.tape.stack import Refused
    from preflop.tapes.choose import shipped
    from preflop.transforms.accumulation import accumulate

    one = shipped(dataclasses.replace(subject, microbatches=1))
    try:
        return None if one is None else accumulate(one, microbatches=subject.microbatches)
    except Refused:
        return None


def record(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Tape:
    """The tape of any call; backward is included if `fn` does it.

    Tensors that `fn` makes are fake; those that it finds (arguments, closures) are read for their
    shapes only, and left as they were, gradients and buffers included.

    Example:
        >>> import torch, preflop
        >>> a, b = torch.randn(4, 8), torch.randn(8, 16)
        >>> preflop.flops_ledger(preflop.record(torch.matmul, a, b)).total()    # 2 * 4 * 8 * 16
        1024

    Raises:
        BadSubject: `fn` is nothing that can be called.
    """
    from preflop.record.call_tape import record_call

    if not callable(fn):
        raise BadSubject(
            f"record needs something to call, and was given {described(fn)}.\n"
            "  Give the function (or module) and its arguments apart: preflop.record(fn, x) for fn(x)."
        )
    return record_call(fn, args, kwargs)


def verify(model: Any, batch: Any = None, **options: Any) -> Verification:
    """Run two real steps here, on the CPU, and hold the prediction against them.

    Takes the arguments of `account`. See `measure.verify.Verification`.
    """
    from preflop.measure.verify import verify_subject
    from preflop.subject import resolve

    return verify_subject(resolve(model, batch, **options))
