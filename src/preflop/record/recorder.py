"""The recorder: one dispatch mode that writes every operator call to a tape.

It sits below autograd and autocast, so it sees what the CPU would be asked to run. It holds storages
weakly, restores what it touched and leaves no hook behind, also when the recorded code raises.
"""

from __future__ import annotations

import gc
import logging
import random
import sys
import warnings
from collections import deque
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from preflop.errors import BadSubject, PreflopError
from preflop.record import assume, by_value, engine
from preflop.record.before import Before
from preflop.record.eager import Eager
from preflop.record.fake import (
    FLOAT_LIMIT_BYTES,
    FOREIGN_FLOAT_ELEMENTS,
    INTEGER_LIMIT_BYTES,
    MASKS_LIMIT_BYTES,
    FakeKernels,
    Fresh,
    Plan,
    cannot_record,
    flatten_result,
    make_plan,
    meta_of,
    plan_output,
    strided,
    written_inputs,
)
from preflop.record.lives import Lives, LongTable
from preflop.record.masks import MAKERS, Count, attended_pairs, count_made
from preflop.record.origin import Origins
from preflop.record.storages import StorageTable, dtype_name
from preflop.tape.events import Call, Mark, Phase, Ref, Role, Signature, SubjectInfo, Tape

aten = torch.ops.aten
_FAKE_LOG = logging.getLogger("torch._subclasses.fake_tensor")
_ADD, _ADD_IN_PLACE = aten.add.Tensor, aten.add_.Tensor
_PRIM_DEVICE = torch.ops.prim.device.default
_LIFT_FRESH = aten.lift_fresh.default
# Results depend on values; never planned.
_BY_VALUE = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.repeat_interleave.Tensor,
    aten._pack_padded_sequence.default,
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
    aten.equal.default,
    aten.is_nonzero.default,
}
_UNDEFINED_FACTORIES = {aten.empty.memory_format, aten.empty_strided.default, aten.rand.default,
                        aten.randn.default, aten.normal.float_float}


class Recorder(TorchDispatchMode):
    """Records every call made while it is active. Use as a context manager, once."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave torch._dynamo alone: wrapping each call for it costs its import and 1 us a call."""
        return False

    def __init__(self, *, lives: bool = False) -> None:
        """With `lives`, the tape says what held each tensor (see `tape.lives`).

        Raises:
            BadSubject: a step is being recorded already.
        """
        super().__init__()
        if any(isinstance(mode, Recorder) for mode in _get_current_dispatch_mode_stack()):
            raise BadSubject(
                "preflop was called inside a step that it records; a recording cannot hold another.\n"
                "  Call it outside of the model's forward, the loss and the optimizer."
            )
        self.kernels = FakeKernels()
        self.table = LongTable() if lives else StorageTable()
        self.lives = Lives(self, self.table) if isinstance(self.table, LongTable) else None
        self.origins = Origins()
        self.recording = True
        self.step = 0
        self.microbatch = 0
        with warnings.catch_warnings():  # what torch imports for fake tensors sets filters of its own
            engine.sole_references()
        self.signatures: list[Signature] = []
        self.calls: list[Call] = []
        self.marks: list[Mark] = []
        self.assumptions: dict[str, None] = {}
        self._plans: dict[Any, Plan | None] = {}
        self._numbers: dict[Any, int] = {}
        self._composite: dict[Any, bool] = {}
        self._stale: set[int] = set()
        """Storage ids of real tensors whose values a fake call would have written."""
        self._taken_different: set[int | None] = set()
        """Storage ids of answers that say so of numbers which are not computed."""
        self._made_by: dict[int | None, int] = {}
        """Storage id -> sequence number of the backward node that made it."""
        self._mask_bytes = 0
        """Of floating masks that were made for real, freed ones too."""
        self._before = Before()
        self.masks: dict[int, Count] = {}
        """Storage id -> attended pairs, of floating masks made from known booleans."""
        self.real = False
        """Run every call for real (`subject_tape.record_real`)."""
        self.protect = False
        """Undo what real calls write to tensors from before the recording."""

    # -- life ------------------------------------------------------------------------------------

    def __enter__(self) -> Recorder:
        self._random = _random_states()
        self._gc = gc.isenabled()
        gc.disable()
        # What exists already need not be searched each time the loop collects its own cycles.
        self._froze = gc.get_freeze_count() == 0
        if self._froze:
            gc.freeze()
        self._rng_reader = torch.get_rng_state
        torch.get_rng_state = self._read_rng_state
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        # torch says so of its own kernels that look at a fake tensor's address; nothing is read there.
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        self._eager = Eager().__enter__()
        self._numpy_reads = assume.NumpyReads(self.assumed).__enter__()
        if self.protect:
            self._before.watch_optimizers()
        # torch logs every refusal of a fake kernel as an error; ours are handled or reported.
        self._log_level = _FAKE_LOG.level
        _FAKE_LOG.setLevel(logging.CRITICAL)
        self.origins.__enter__()
        self._grad = torch.is_grad_enabled()
        self._below = torch._C._len_torch_dispatch_stack()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            self._leave(*error)
        finally:
            self.origins.__exit__(*error)
            self._numpy_reads.__exit__(*error)
            self._eager.__exit__(*error)
            torch.get_rng_state = self._rng_reader
            _FAKE_LOG.setLevel(self._log_level)
            self._before.restore()
            self._warnings.__exit__(*error)
            _set_random_states(self._random)
            if self._froze:
                gc.unfreeze()
            if self._gc:
                gc.enable()

    def _leave(self, *error: Any) -> None:
        """Leave the mode, and those that an error kept from being left further down.

        A RecursionError strikes in any call, also in that of a `with` block's `__exit__` (`_decompose`, fake kernels).
        """
        while torch._C._len_torch_dispatch_stack() > self._below + 1:
            torch._C._pop_torch_dispatch_stack(None)
        for flags in vars(self).values():
            if isinstance(flags, deque):  # what TorchDispatchMode.__enter__ saw, once for each time
                while len(flags) > 1:
                    flags.pop()
        if error[0] is not None:
            torch.set_grad_enabled(self._grad)
        super().__exit__(*error)

    def _read_rng_state(self) -> torch.Tensor:
        """torch.get_rng_state, whose result is memory that no dispatcher sees (checkpoint keeps it)."""
        state = self._rng_reader()
        if self.recording:
            self.table.born(state, -1)
        return state

    def assumed(self, text: str) -> None:
        """Write an assumption on the tape, once."""
        self.assumptions.setdefault(text)

    def mark(self, name: str) -> None:
        """Mark a moment of the loop."""
        self.marks.append(Mark(self.table.next_tick(), name, self.step, self.microbatch))

    def tape(self, subject: SubjectInfo | None, steps: int) -> Tape:
        """What was recorded.

        Raises:
            Refused: with `lives`, something was seen that the notes cannot say.
        """
        if self.lives is not None:
            self.lives.close()
        self.table.order_deaths()
        tape = Tape(
            subject=subject,
            signatures=self.signatures,
            calls=self.calls,
            storages=self.table.storages,
            modules=self.origins.modules,
            module_types=self.origins.module_types,
            sources=self.origins.sources,
            marks=self.marks,
            assumptions=list(self.assumptions),
            steps=steps,
        )
        self.table.close()
        return tape if self.lives is None else self.lives.write_into(tape)

    # -- one call --------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _PRIM_DEVICE:
            return _device_of(args[0])
        kwargs = kwargs or {}
        if func is _ADD and not torch.is_grad_enabled() and self._engine_adds(args):
            func = _ADD_IN_PLACE
        if func in engine.IN_PLACE_ON_REAL and self._fills_own_zeros(args):
            func = engine.IN_PLACE_ON_REAL[func]
        if not isinstance(func, torch._ops.OpOverload):
            return self._higher_order(func, args, kwargs)
        if func.namespace in ("profiler", "prim"):  # prim: what a subclass says its layout is
            return func(*args, **kwargs)
        if func is _LIFT_FRESH and self.recording and args[0].layout is torch.strided:
            # torch.tensor(...): memory that no call made, and that is new.
            self.table.born(args[0], len(self.calls))
        if self._is_composite(func):
            result = self._decompose(func, args, kwargs)
            if result is not NotImplemented:
                return result
        tensors: list[torch.Tensor] = []
        parts: list[Any] = [func]
        kwargs = _on_cpu(kwargs, self)
        try:
            _flatten(args, tensors, parts)
            if kwargs:
                _flatten_mapping(kwargs, tensors, parts)
        except _Odd:
            return self._slow(func, args, kwargs)
        if self.real:
            return self._run_real(func, args, kwargs, tensors)
        real = self._all_real(tensors)
        if func in _BY_VALUE:
            return self._by_value(func, args, kwargs, tensors, real)
        key = tuple(parts)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._find_plan(func, args, kwargs, tensors, key, real)
            if plan is None:
                return self._run_real(func, args, kwargs, tensors)
        if plan.only_views and not any(type(tensor) is FakeTensor for tensor in tensors):
            real = True
        if real and self._worth_real(func, plan, tensors):
            return self._run_real(func, args, kwargs, tensors)
        return self._run_fake(func, args, kwargs, tensors, plan)

    def _decompose(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a composite operator that arrived whole (inference mode), recording its parts."""
        tensors: list[torch.Tensor] = []
        _tensors_in((args, kwargs), tensors)
        self._refuse_nested(func, tensors)
        super().__enter__()  # the mode alone; the recording is under way
        try:
            return func.decompose(*args, **kwargs)
        finally:
            super().__exit__(None, None, None)

    def _engine_adds(self, args: tuple[Any, ...]) -> bool:
        """Whether the engine sums two gradients here, and would do it in place (see `engine`).

        The engine runs the sum while the node that made the second gradient is current. A sum inside
        a node's own formula has a first operand that the same node made.
        """
        node = torch._C._current_autograd_node()
        if node is None or len(args) != 2 or not self.origins.in_engine():
            return False
        maker = self._made_by.get(self.table.known(args[0]))
        return maker != node._sequence_nr() and engine.adds_in_place(*args)

    def _fills_own_zeros(self, args: tuple[Any, ...]) -> bool:
        """Whether a node's formula writes into zeros that it has just made (see `engine`)."""
        node = torch._C._current_autograd_node()
        if node is None or torch.is_grad_enabled() or not self.origins.in_engine():
            return False
        return self._made_by.get(self.table.known(args[0])) == node._sequence_nr()

    def _is_composite(self, func: Any) -> bool:
        known = self._composite.get(func)
        if known is None:
            has = torch._C._dispatch_has_kernel_for_dispatch_key
            known = self._composite[func] = has(
                func.name(), "CompositeImplicitAutograd"
            ) and not has(func.name(), "CPU")
        return known

    def _all_real(self, tensors: list[torch.Tensor]) -> bool:
        for tensor in tensors:
            if type(tensor) is FakeTensor or self._opaque(tensor):
                return False
        return True

    def _opaque(self, tensor: torch.Tensor) -> bool:
        """A real tensor whose values must not be used: too big to compute with, a parameter, stale."""
        if tensor.device.type != "cpu":
            return True
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            if tensor.requires_grad or tensor.numel() > FOREIGN_FLOAT_ELEMENTS:
                return self._opaque_big(tensor)
        if self._stale:
            number = self.table.known(tensor)
            return number is not None and number in self._stale
        return False

    def _opaque_big(self, tensor: torch.Tensor) -> bool:
        if tensor.requires_grad and tensor.numel() > 1:
            return True
        return tensor.numel() * tensor.itemsize > FLOAT_LIMIT_BYTES

    def _find_plan(
        self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], key: Any, real: bool
    ) -> Plan | None:
        try:
            plan, _ = self.kernels.plan(func, args, kwargs, tensors)
        except PreflopError:
            raise
        except (NotImplementedError, RuntimeError, TypeError) as error:
            if real:
                return None
            plan = self._plan_by_twins(func, args, kwargs, tensors, error)
        self._plans[key] = plan
        return plan

    def _plan_by_twins(
        self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], error: Exception
    ) -> Plan:
        """The fake kernel refused. Where it is stricter than the real one, a decomposition or small
        real stand-ins tell the result; else the operator's own complaint reaches the user."""
        result = func.decompose(*args, **kwargs) if self._is_composite(func) else NotImplemented
        if result is not NotImplemented:
            flat, pack = flatten_result(result)
            return make_plan(
                func, tuple(plan_output(i, tensors) for i in flat), pack, args, kwargs, tensors
            )
        stand_in = _real_stand_in(func, args, kwargs, tensors)
        if stand_in is None:
            if isinstance(error, NotImplementedError) or "fake" in f"{type(error).__module__} {error}":
                raise cannot_record(func, error, self.origins.line_now()) from error
            raise error
        inputs, result = stand_in
        flat, pack = flatten_result(result)
        return make_plan(
            func, tuple(plan_output(i, inputs) for i in flat), pack, args, kwargs, tensors
        )

    def _worth_real(self, func: Any, plan: Plan, tensors: list[torch.Tensor]) -> bool:
        if plan.only_views or (plan.writes and not plan.fresh_float_bytes):
            return True
        if not tensors and func in _UNDEFINED_FACTORIES and plan.fresh_float_bytes:
            return False
        if func in assume.CHECKS and self.table.known(tensors[0]) in self._taken_different:
            return False
        if func is aten.where.self and tensors[0].dtype is torch.bool and _two_numbers(tensors):
            return self._room_for_mask(plan.fresh_float_bytes, tensors[1].itemsize)
        return (
            plan.fresh_float_bytes <= FLOAT_LIMIT_BYTES
            and plan.fresh_integer_bytes <= INTEGER_LIMIT_BYTES
        )

    def _room_for_mask(self, size_bytes: int, itemsize: int) -> bool:
        """Whether a floating mask is made for real: one of so many numbers, and all of them in so many bytes (each
        layer may make its own, and keep it for backward). What is attended is known without (`masks`)."""
        if size_bytes // itemsize > INTEGER_LIMIT_BYTES or self._mask_bytes + size_bytes > MASKS_LIMIT_BYTES:
            return False
        self._mask_bytes += size_bytes
        return True

    # -- three ways to run it --------------------------------------------------------------------

    def _run_fake(
        self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], plan: Plan
    ) -> Any:
        if func in by_value.CHECKED and not self._stale:
            by_value.check_indices(func, args)
        make = self.kernels.make
        outputs = [make(output, tensors) for output in plan.outputs]
        choice = assume.choice_output(func)
        if choice is not None:
            self._choose(func, args, kwargs, outputs, choice)
        elif func in assume.ASKS:
            self._answer(func, args, outputs)
        for index in plan.writes:
            self._mark_stale(func, tensors[index])
        if self.recording:
            if plan.signature < 0:
                plan.signature = self._intern(func, args, kwargs, tensors, outputs, plan.writes)
            self._write(plan.signature, tensors, outputs)
            if func in MAKERS:
                self._note_mask(func, args)
        return plan.pack(outputs)

    def _run_real(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        writes = written_inputs(func, args, kwargs, tensors)
        if self.protect:
            for index in writes:
                self._save_foreign(tensors[index])
        result = func(*args, **kwargs)
        if self.recording:
            flat, _ = flatten_result(result)
            outputs = [item for item in flat if isinstance(item, torch.Tensor)]
            signature = self._signature_of(func, args, kwargs, tensors, outputs, writes)
            self._write(signature, tensors, outputs)
            if func in MAKERS:
                self._note_mask(func, args)
        return result

    def _slow(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Tensors that are not strided (sparse, nested, quantised): torch's fake mode, uncached."""
        tensors: list[torch.Tensor] = []
        _tensors_in((args, kwargs), tensors)
        if self.real or self._all_real(tensors):
            return self._run_real(func, args, kwargs, tensors)
        self._refuse_nested(func, tensors)
        try:
            with self.kernels.mode:
                result = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            raise cannot_record(func, error, self.origins.line_now()) from error
        if self.recording:
            flat, _ = flatten_result(result)
            outputs = [item for item in flat if isinstance(item, torch.Tensor)]
            self._write(
                self._signature_of(func, args, kwargs, tensors, outputs, ()), tensors, outputs
            )
        return result

    def _refuse_nested(self, func: Any, tensors: list[torch.Tensor]) -> None:
        """Nested tensors have parts of their own, which come here again under the operator's own name.

        Raises:
            BadSubject: one of the tensors is nested; the message says where, and what to do.
        """
        if any(tensor.is_nested for tensor in tensors):
            line = self.origins.line_now()
            raise BadSubject(
                f"{func} of a nested tensor{f' at {line}' if line else ''}: samples of several lengths in one tensor "
                "are not recorded.\n  Give a dense tensor, padded: torch.nested.to_padded_tensor(x, 0.0)."
            )

    def _higher_order(self, func: Any, args: Any, kwargs: Any) -> Any:
        from preflop.record.higher_order import run_higher_order

        return run_higher_order(self, func, args, kwargs)

    def made(self, op: str, args: tuple[Any, ...], outputs: list[torch.Tensor], pairs: int | None) -> None:
        """Write a call that torch did not dispatch (higher_order), with fresh outputs."""
        if not self.recording:
            return
        tensors = [item for item in args if isinstance(item, torch.Tensor)]
        counter = iter(range(len(tensors)))
        signature = Signature(
            op=op,
            overload="default",
            args=tuple(_plain(item, counter) for item in args),
            kwargs=(),
            inputs=tuple(meta_of(tensor) for tensor in tensors),
            outputs=tuple(meta_of(output) for output in outputs),
            aliases=(None,) * len(outputs),
            writes=(),
            attended_pairs=pairs,
        )
        number = self._numbers.get(signature)
        if number is None:
            number = self._numbers[signature] = len(self.signatures)
            self.signatures.append(signature)
        self._write(number, tensors, outputs)

    # -- values ----------------------------------------------------------------------------------

    def _by_value(
        self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], real: bool
    ) -> Any:
        if real and func in (aten.index.Tensor, aten._unsafe_index.Tensor, aten.repeat_interleave.Tensor):
            real = sum(t.numel() * t.itemsize for t in tensors) <= INTEGER_LIMIT_BYTES
        if real:
            return self._run_real(func, args, kwargs, tensors)
        return by_value.run(self, func, args, kwargs, tensors)

    def _note_mask(self, func: Any, args: Any) -> None:
        """Count the floating mask that the last call made; one that is made from another is not known."""
        count = count_made(func, args)
        storages = self.calls[-1].storages
        if count is not None and not any(number in self.masks for number in storages):
            self.masks[storages[-1]] = count

    def maker(self, tensor: torch.Tensor) -> str:
        """The operator that made the tensor's memory, or ""."""
        number = self.table.known(tensor)
        call = -1 if number is None else self.table.storages[number].call
        return "" if call < 0 else self.signatures[self.calls[call].signature].op

    def planned(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a call whose values were made known (by_value) as an ordinary fake one."""
        tensors: list[torch.Tensor] = []
        parts: list[Any] = [func]
        _flatten(args, tensors, parts)
        _flatten_mapping(kwargs, tensors, parts)
        key = tuple(parts)
        plan = self._plans.get(key) or self._find_plan(func, args, kwargs, tensors, key, False)
        assert plan is not None
        return self._run_fake(func, args, kwargs, tensors, plan)

    def _choose(
        self, func: Any, args: Any, kwargs: Any, outputs: list[Any], choice: int
    ) -> None:
        """Give the chosen indices balanced real values, so that what follows can be followed."""
        chosen = outputs[choice]
        if chosen is None or chosen.numel() * 8 > INTEGER_LIMIT_BYTES:
            return
        laid_out = torch.empty_strided(chosen.shape, chosen.stride(), dtype=torch.int64)
        outputs[choice] = laid_out.copy_(assume.balanced_choice(func, args, kwargs, chosen.shape))
        if func in (aten.topk.default, aten.multinomial.default, aten.argmax.default):
            name = func.name().removeprefix("aten::")
            self.assumed(
                f"{name} chooses by values that are not computed: taken as balanced "
                "(every candidate equally often)."
            )

    def _answer(self, func: Any, args: Any, outputs: list[Any]) -> None:
        """Give the answer to a question after floats its assumed value, so that what follows can be followed."""
        taken = assume.taken_answer(func, args)
        if taken is None or outputs[0].numel() > INTEGER_LIMIT_BYTES or type(outputs[0]) is not FakeTensor:
            return
        truth, words = taken
        if words is assume.DIFFERENT and self.origins.in_engine():
            return  # where the largest was: a node's formula shares a gradient out by it, reading no value
        laid_out = torch.empty_strided(outputs[0].shape, outputs[0].stride(), dtype=torch.bool)
        outputs[0] = laid_out.fill_(truth)
        if words is assume.DIFFERENT and self.recording:
            self._taken_different.add(self.table.born(outputs[0], len(self.calls)))
        self.assumed(words)

    def _mark_stale(self, func: Any, tensor: torch.Tensor) -> None:
        if type(tensor) is FakeTensor or func is aten._amp_foreach_non_finite_check_and_unscale_.default:
            return
        number = self.table.known(tensor)
        if number is None:
            number = self.table.was_there(tensor, Role.BUFFER)
        self._stale.add(number)
        if self.protect and self.table.storages[number].born == 0:
            self._before.save_version(tensor)

    def _save_foreign(self, tensor: torch.Tensor) -> None:
        number = self.table.known(tensor)
        if number is None or self.table.storages[number].born == 0:
            self._before.save_values(tensor)

    def save_grad(self, leaf: torch.Tensor) -> None:
        """Remember the gradient of a leaf from before the recording; it is put back at the end."""
        self._before.save_grad(leaf)

    # -- writing ---------------------------------------------------------------------------------

    def _write(self, signature: int, tensors: list[torch.Tensor], outputs: list[Any]) -> None:
        table = self.table
        number = len(self.calls)
        storages = [self.storage_of(tensor) for tensor in tensors]
        storages += [table.born(output, number) for output in outputs if output is not None]
        origin = self.origins.of_call()
        if origin.phase is Phase.BACKWARD:
            for made in storages[len(tensors) :]:
                self._made_by.setdefault(made, self.origins.node)
            if self.signatures[signature].op == "aten.detach":
                self._note_gradient(outputs)
        self.calls.append(
            Call(
                signature,
                tuple(storages),
                table.next_tick(),
                origin.phase,
                self.step,
                self.microbatch,
                origin.module,
                origin.source,
            )
        )

    def storage_of(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's storage; memory that was never seen is entered."""
        number = self.table.known(tensor)
        if number is None:
            # Memory that no call made and nobody declared: a plain tensor attribute, a closure's.
            role = Role.PARAMETER if tensor.requires_grad and tensor.is_leaf else Role.BUFFER
            if self.protect and role is Role.PARAMETER:
                self.save_grad(tensor)
            number = self.table.was_there(tensor, role)
        return number

    def _note_gradient(self, outputs: list[Any]) -> None:
        node = torch._C._current_autograd_node()
        leaf = getattr(node, "variable", None)
        if leaf is None:
            return
        self.table.set_role(outputs[0], Role.GRADIENT)
        if self.protect:
            self.save_grad(leaf)

    def _signature_of(
        self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], outputs: list[Any],
        writes: tuple[int, ...],
    ) -> int:
        """Intern by content, for calls that have no plan."""
        metas = tuple(meta_of(tensor) for tensor in tensors)
        results = tuple(meta_of(output) for output in outputs)
        key = (func, metas, results, _plain_key(args), _plain_key(kwargs))
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = self._intern(func, args, kwargs, tensors, outputs, writes)
        return number

    def _intern(
        self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], outputs: list[Any],
        writes: tuple[int, ...],
    ) -> int:
        kept = [output for output in outputs if output is not None]
        by_storage = {id(t.untyped_storage()): i for i, t in reversed(list(enumerate(tensors))) if strided(t)}
        counter = iter(range(len(tensors)))
        plain_args = tuple(_plain(arg, counter) for arg in args)
        plain_kwargs = tuple((name, _plain(value, counter)) for name, value in kwargs.items())
        namespace, name, overload = _split(func)
        inside = assume.ALLOCATES_INSIDE.get(f"{namespace}.{name}")
        if inside is not None:
            self.assumed(f"{namespace}.{name} {inside}.")
        self.signatures.append(
            Signature(
                op=f"{namespace}.{name}",
                overload=overload,
                args=plain_args,
                kwargs=plain_kwargs,
                inputs=tuple(meta_of(tensor) for tensor in tensors),
                outputs=tuple(meta_of(output) for output in kept),
                aliases=tuple(
                    by_storage.get(id(output.untyped_storage())) if strided(output) else None
                    for output in kept
                ),
                writes=writes,
                attended_pairs=attended_pairs(self, name, args, kwargs),
            )
        )
        return len(self.signatures) - 1


class _Odd(Exception):
    """An argument that has no key."""


def _flatten(args: Any, tensors: list[torch.Tensor], parts: list[Any]) -> None:
    """Append the tensors of an argument list, and a hashable key of everything that shapes the result."""
    for arg in args:
        if isinstance(arg, torch.Tensor):
            if arg.layout is not torch.strided:
                raise _Odd
            tensors.append(arg)
            parts.append(arg.shape)
            parts.append(arg.stride())
            parts.append(arg.storage_offset())
            parts.append(arg.dtype)
        elif isinstance(arg, (list, tuple)):
            parts.append("[")
            _flatten(arg, tensors, parts)
            parts.append("]")
        else:
            parts.append(arg.__class__)
            parts.append(arg)


def _flatten_mapping(kwargs: Any, tensors: list[torch.Tensor], parts: list[Any]) -> None:
    for name, value in kwargs.items():
        parts.append(name)
        _flatten((value,), tensors, parts)


def _tensors_in(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _tensors_in(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _tensors_in(item, found)


def _two_numbers(tensors: list[torch.Tensor]) -> bool:
    """Whether `where` chooses between numbers: a floating mask, which may be as large as a boolean one."""
    return all(tensor.numel() == 1 for tensor in tensors[1:])


def _plain(value: Any, counter: Any) -> Any:
    """An argument as the tape keeps it."""
    if isinstance(value, torch.Tensor):
        return Ref(next(counter))
    if isinstance(value, (list, tuple)):
        return tuple(_plain(item, counter) for item in value)
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, (torch.device, torch.layout, torch.memory_format)):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(type(value).__name__)


def _plain_key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return None
    if isinstance(value, dict):
        return tuple((name, _plain_key(item)) for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_plain_key(item) for item in value)
    return (type(value), value) if isinstance(value, (bool, int, float)) else str(value)


def _split(func: Any) -> tuple[str, str, str]:
    full = func.name()
    namespace, rest = full.split("::", 1)
    return namespace, rest.split(".")[0], func._overloadname


def _device_of(tensor: torch.Tensor) -> torch.device:
    if type(tensor) is FakeTensor:
        if tensor.fake_mode.in_kernel_invocation:
            return torch.device("meta")
        return tensor.fake_device
    return tensor.device


def _on_cpu(kwargs: Any, recorder: Recorder) -> Any:
    """A factory that asks for another device gets the CPU: the recording stands for that device."""
    device = kwargs.get("device")
    if device is None or device.type == "cpu":
        return kwargs
    if device.type != "meta":
        recorder.assumed(f"tensors made on {device} are recorded as the one device's.")
    return {
        **kwargs,
        "device": torch.device("cpu"),
        **({"pin_memory": False} if "pin_memory" in kwargs else {}),
    }


def _real_stand_in(
    func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]
) -> tuple[list[torch.Tensor], Any] | None:
    """Run the operator once on real zeros, where they are small, to learn what it returns."""
    if any(not strided(tensor) for tensor in tensors):
        return None
    if sum(tensor.numel() * tensor.itemsize for tensor in tensors) > INTEGER_LIMIT_BYTES:
        return None
    made: dict[int, torch.Tensor] = {}

    def twin(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in made:
                if type(value) is FakeTensor:
                    made[id(value)] = torch.empty_strided(
                        tuple(value.shape), value.stride(), dtype=value.dtype
                    ).zero_()
                else:
                    made[id(value)] = value.detach().clone()
            return made[id(value)]
        if isinstance(value, (list, tuple)):
            return type(value)(twin(item) for item in value)
        return value

    real_args = tuple(twin(arg) for arg in args)
    real_kwargs = {name: twin(value) for name, value in kwargs.items()}
    inputs = [twin(tensor) for tensor in tensors]
    try:
        return inputs, func(*real_args, **real_kwargs)
    except (NotImplementedError, RuntimeError):
        return None


def _random_states() -> tuple[Any, Any, Any]:
    numpy_state = None
    if "numpy" in sys.modules:
        numpy_state = sys.modules["numpy"].random.get_state()
    return torch.random.default_generator.get_state(), random.getstate(), numpy_state


def _set_random_states(states: tuple[Any, Any, Any]) -> None:
    torch.random.default_generator.set_state(states[0])
    random.setstate(states[1])
    if states[2] is not None:
        sys.modules["numpy"].random.set_state(states[2])


__all__ = ["BadSubject", "Fresh", "Recorder"]
