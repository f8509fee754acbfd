"""Recomputation: the tape of a step that runs chosen modules again in backward, from one that does not.

The tape must be annotated (`tape.lives`): it says when Python let go of each tensor, what autograd kept of
it and in which module, and when backward first asked for something of a module's call. From that follows
what torch.utils.checkpoint makes of the step (torch/utils/checkpoint.py, `use_reentrant=False`):

1. In forward nothing that autograd keeps in a chosen module's call (a *region*) is held. What the module was
   given is, and a copy of the CPU's random state, until autograd has given up all it kept in the region.
2. When backward first asks for something kept in a region, the region's calls are made again, up to the last
   tensor that autograd kept (early stop). What was kept is then held by the new tensors, each until backward
   lets go of it; what else was made dies at the stop.
3. Selective: results of the kept operators are held too, from forward until they are used in the rerun, where
   their calls are left out.

Every hold is counted (`transforms.held`), and memory dies with its last one. The reentrant kind is
`transforms.reentrant`'s.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from preflop.errors import BadSubject
from preflop.recomputation import KEPT_OPERATORS, NO_BLOCKS, Manner, Recomputation, alike, parse
from preflop.tape import lives
from preflop.tape.events import Call, Phase, Role, Tape
from preflop.tape.replay import BIRTH, CALL, DEATH
from preflop.tape.sizes import ParametricTape
from preflop.tape.stack import CutTape, Refused
from preflop.transforms.depth import unfold
from preflop.transforms.held import Key, Played, is_note, key_of, random_state
from preflop.transforms.reentrant import Reentrant


def recompute(tape: Tape, *, how: str | Callable[[str], bool]) -> Tape:
    """The tape of the same step with chosen modules run again in backward.

    Args:
        tape: annotated, of a step that recomputes nothing.
        how: as `recompute=` of `preflop.account`.

    Returns:
        A plain tape. With "none", the tape without its notes (itself where it has none).

    Raises:
        BadSubject: the word is not known, or chooses no module of the tape.
        Refused: what torch would do does not follow from the tape; record it anew.
    """
    wanted = parse(how)
    if wanted is None:
        return lives.plain(tape)
    if tape.subject is None or not lives.annotated(tape):
        raise Refused("the tape does not say what held its tensors")
    if any(call.phase is Phase.RECOMPUTE for call in tape.calls):
        raise Refused("the model recomputes by itself")
    name = how if isinstance(how, str) else getattr(how, "__qualname__", type(how).__name__)
    chosen = _chosen(tape, wanted)
    reentrant = wanted.manner is Manner.REENTRANT
    made = Reentrant(tape, chosen).run() if reentrant else _Rerun(tape, wanted, chosen).run()
    return dataclasses.replace(made, subject=dataclasses.replace(tape.subject, recompute=name))


def recompute_cut(cut: CutTape, *, how: str | Callable[[str], bool]) -> CutTape:
    """As `recompute`, of a tape whose stacks of blocks are cut down.

    Where all blocks are treated alike the stacks stay cut; else they are unfolded first.

    Raises:
        BadSubject, Refused: as `recompute`; also where the stacks do not unfold.
    """
    if alike(how):
        return dataclasses.replace(cut, tape=recompute(cut.tape, how=how))
    return CutTape(recompute(unfold(cut), how=how), ())


def recompute_at_any_size(
    parametric: ParametricTape, *, how: str | Callable[[str], bool]
) -> ParametricTape:
    """As `recompute`, of a parametric tape: sizes stay symbols, for the transform does not look at them.

    Raises:
        BadSubject, Refused: as `recompute_cut`.
    """
    cut = recompute_cut(CutTape(parametric.tape, parametric.stacks), how=how)
    return dataclasses.replace(parametric, tape=cut.tape, stacks=cut.stacks)


def _chosen(tape: Tape, wanted: Recomputation) -> set[int]:
    """The modules that run again, by number."""
    if wanted.chosen is not None:
        names = set(wanted.of_modules(tape.modules))
        return {number for number, path in enumerate(tape.modules) if path in names}
    blocks = {
        call.module
        for call in tape.calls
        if tape.signatures[call.signature].op == lives.ENTER and tape.signatures[call.signature].args[1]
    }
    if not blocks:
        raise BadSubject(NO_BLOCKS)
    containers = {path: number for number, path in reversed(list(enumerate(tape.modules)))}

    def place(module: int) -> tuple[int, int]:
        container, _, name = tape.modules[module].rpartition(".")
        return containers.get(container, 0), int(name) if name.isdigit() else module

    return set(wanted.of_blocks(sorted(blocks, key=place)))


@dataclass(eq=False, slots=True)
class _Saved:
    """One tensor that autograd keeps."""

    storage: int
    """Its number on the recorded tape."""
    region: _Region | None
    """The call of a chosen module in which it was kept."""
    holds: int | None = None
    """The storage of the new tape that is held for it."""
    given_up: bool = False


@dataclass(eq=False, slots=True)
class _Region:
    """One call of a chosen module in which gradients are wanted."""

    module: int
    source: int
    """The line that called it."""
    state: int
    """The copy of the random state that is held for it."""
    given: tuple[int, ...]
    """The storages that it was given."""
    events: list[tuple[int, int]] = field(default_factory=list)
    """What happened in it, notes included."""
    saved: list[_Saved] = field(default_factory=list)
    left: int = 0
    """Kept tensors that autograd has not given up."""
    results: dict[int, list[int]] = field(default_factory=dict)
    """Selective: call -> the storages that are held of its results."""
    again: dict[int, int] = field(default_factory=dict)
    """Once it ran again: recorded storage -> storage of the new tape."""
    over: bool = False
    ran: bool = False


class _Rerun(Played):
    """Plays the recorded events; at the first need of what a region kept, the region once more."""

    def __init__(self, tape: Tape, wanted: Recomputation, chosen: set[int]) -> None:
        super().__init__(tape)
        self.chosen = chosen
        self.selective = wanted.manner is Manner.SELECTIVE
        self.region: _Region | None = None
        self.unwanted: list[int] = []
        """The chosen module that runs without gradients: the random state it holds."""
        self.home: dict[int, _Region] = {}
        """Recorded storages born in a region."""
        self.unwritten: Counter[int] = Counter()
        """Storages that torch checks not to be written into until a region runs again."""
        self.kept: dict[Key, list[_Saved]] = defaultdict(list)
        self.escaped: dict[Key, list[_Saved]] = defaultdict(list)

    # -- events ------------------------------------------------------------------------------------

    def play(self, kind: int, index: int) -> None:
        if self.region is not None:
            self.region.events.append((kind, index))
        super().play(kind, index)

    def birth(self, number: int) -> None:
        super().birth(number)
        if self.region is not None:
            self.home[number] = self.region

    def call(self, index: int) -> None:
        call = self.tape.calls[index]
        signature = self.tape.signatures[call.signature]
        if any(self.unwritten[call.storages[place]] for place in signature.writes):
            raise Refused(f"{signature.op} writes into what a chosen module was given or is to keep")
        self.write(call, tuple(self._meant(storage, call) for storage in call.storages))
        region = self.region
        if region is None:
            return
        if call.phase is Phase.BACKWARD:
            raise Refused("backward runs inside a chosen module")
        if self.selective and signature.op in KEPT_OPERATORS and signature.overload == "default":
            results = list(call.storages[len(signature.inputs) :])
            region.results[index] = results
            self._keep(results)

    def _keep(self, numbers: Sequence[int]) -> None:
        self.unwritten.update(numbers)
        for number in numbers:
            self.holds.hold(number)

    def unkeep(self, numbers: Sequence[int]) -> None:
        """What was held for a region is so no more."""
        self.unwritten.subtract(numbers)
        for number in numbers:
            self.holds.release(number)

    def _meant(self, storage: int, call: Call) -> int:
        """The storage of the new tape that a call uses for a recorded one."""
        region = self.home.get(storage)
        again = storage if region is None else region.again.get(storage, storage)
        inside = region is not None and self.within(call.module, region.module)
        first, second = (again, storage) if inside else (storage, again)
        if first in self.holds.counts:
            return first
        if second in self.holds.counts:
            return second
        raise Refused(f"{self.ops[call.signature]} uses a tensor that would be gone")

    # -- notes -------------------------------------------------------------------------------------

    def note(self, call: Call) -> None:
        op = self.ops[call.signature]
        if op == lives.DROP:
            self.python_lets_go(call.storages[0])
        elif op in (lives.ENTER, lives.EXIT):
            if call.module in self.chosen:
                (self._enter if op == lives.ENTER else self._exit)(call)
        elif op == lives.SAVE:
            self._save(call)
        elif op == lives.UNPACK:
            region = self.kept[key_of(call)][-1].region
            if region is not None and not region.ran:
                self._run_again(region, call)
        elif op in (lives.RELEASE, lives.ESCAPE):
            self._give_up(call, escapes=op == lives.ESCAPE)
        elif op == lives.GONE:
            self._forget(self.escaped[key_of(call)].pop())
        elif op == lives.LET_GO:
            saved = self.kept[key_of(call)][-1]
            if saved.region is not None:
                self._forget(saved)

    def is_cast(self, number: int) -> bool:
        """Whether autocast's cache may have given the tensor; in the rerun it would be made anew."""
        maker = self.tape.storages[number].call
        if maker < 0 or self.ops[self.tape.calls[maker].signature] != "aten._to_copy":
            return False
        return self.tape.storages[self.tape.calls[maker].storages[0]].role is Role.PARAMETER

    def _enter(self, call: Call) -> None:
        if self.region is not None or self.unwanted:
            raise Refused("one chosen module runs inside another")
        grad, _, nbytes = self.tape.signatures[call.signature].args[:3]
        state = self.holds.new(random_state(nbytes), made=False)
        if not grad:
            self.unwanted = [state]
            return
        self.region = _Region(call.module, call.source, state, call.storages)
        self._keep(call.storages)

    def _exit(self, call: Call) -> None:
        region, self.region = self.region, None
        for number in self.unwanted:
            self.holds.release(number)
        self.unwanted = []
        if region is not None:
            self._check_stateless(region, set(call.storages))
            region.over = True
            self._end(region)

    def _check_stateless(self, region: _Region, returned: set[int]) -> None:
        """Whoever keeps a tensor for later (a cache of keys and values, a list that grows) may do otherwise
        when run again. Autocast's cache of parameters is made anew, as autocast is."""
        for kind, index in region.events:
            if kind == BIRTH and index in self.python and index not in returned and not self.is_cast(index):
                raise Refused("a chosen module keeps a tensor that it does not return")

    def _end(self, region: _Region) -> None:
        """With the last kept tensor, what is held for the region goes."""
        if region.left or not region.over:
            return
        self.holds.release(region.state)
        self.unkeep(region.given)
        for results in region.results.values():
            self.unkeep(results)

    def _save(self, call: Call) -> None:
        saved = _Saved(call.storages[0], self.region)
        self.kept[key_of(call)].append(saved)
        if self.region is not None:
            self.region.saved.append(saved)
            self.region.left += 1
            return
        saved.holds = self._meant(saved.storage, call)
        self.holds.hold(saved.holds)

    def _give_up(self, call: Call, *, escapes: bool) -> None:
        saved = self.kept[key_of(call)].pop()
        saved.given_up = True
        if escapes:
            self.escaped[key_of(call)].append(saved)
        else:
            self._forget(saved)
        if saved.region is not None:
            saved.region.left -= 1
            self._end(saved.region)

    def _forget(self, saved: _Saved) -> None:
        if saved.holds is not None:
            self.holds.release(saved.holds)
            saved.holds = None

    # -- running again -----------------------------------------------------------------------------

    def _run_again(self, region: _Region, at: Call) -> None:
        """The region's calls once more, up to the last tensor that autograd kept."""
        region.ran = True
        state = self.holds.new(self.holds.storages[region.state], made=False)
        _Again(self, region, at).run()
        self.holds.release(state)


class _Again:
    """One rerun of a region."""

    def __init__(self, rerun: _Rerun, region: _Region, at: Call) -> None:
        self.rerun, self.region, self.at = rerun, region, at
        self.tape, self.holds = rerun.tape, rerun.holds
        self.python: set[int] = set()
        """Recorded storages whose new ones Python holds."""
        self.graph: dict[Key, list[int]] = defaultdict(list)
        """Storages that the rerun's own graph holds."""
        self.seen = 0
        """Saved tensors that were made again."""

    def run(self) -> None:
        for kind, index in self.region.events:
            if kind == BIRTH:
                self._birth(index)
            elif kind == DEATH:
                self._python_lets_go(index)
            elif kind == CALL and is_note(self.rerun.ops[self.tape.calls[index].signature]):
                self._note(self.tape.calls[index])
                if self.seen == len(self.region.saved):
                    break
            elif kind == CALL:
                self._call(index)
        for number in sorted(self.python):
            self.holds.release(self.region.again[number])
        for numbers in self.graph.values():
            for number in numbers:
                self.holds.release(number)

    def _birth(self, number: int) -> None:
        storage = self.tape.storages[number]
        if storage.call in self.region.results:
            return
        self.region.again[number] = self.holds.new(storage, made=storage.call >= 0)
        self.python.add(number)

    def _python_lets_go(self, number: int) -> None:
        if number in self.python:
            self.python.remove(number)
            self.holds.release(self.region.again[number])

    def _call(self, index: int) -> None:
        kept = self.region.results.pop(index, None)
        if kept is not None:
            for number in set(kept) - self.python:  # Python holds what it is given back
                self.holds.hold(number)
                self.region.again[number] = number
                self.python.add(number)
            self.rerun.unkeep(kept)
            return
        call = self.tape.calls[index]
        # Backward runs the module's forward, not what called it: neither its name nor that line is known.
        path = self.tape.modules[self.region.module] + "."
        self.rerun.write(
            call,
            tuple(self._meant(storage) for storage in call.storages),
            phase=Phase.RECOMPUTE,
            step=self.at.step,
            microbatch=self.at.microbatch,
            module=call.module if self.tape.modules[call.module].startswith(path) else 0,
            source=0 if call.source == self.region.source else call.source,
        )

    def _meant(self, number: int) -> int:
        if self.rerun.home.get(number) is self.region:
            found = self.region.again.get(number)
        else:
            found = number
            if self.rerun.is_cast(number):
                raise Refused("a cast of a parameter is shared between a chosen module and others")
        if found is None or found not in self.holds.counts:
            raise Refused("a chosen module uses a tensor from outside that would be gone")
        return found

    def _note(self, call: Call) -> None:
        op = self.rerun.ops[call.signature]
        if op == lives.DROP:
            self._python_lets_go(call.storages[0])
        elif op == lives.SAVE:
            self._save(call)
        elif op in (lives.RELEASE, lives.ESCAPE) and self.graph.get(key_of(call)):
            self.holds.release(self.graph[key_of(call)].pop())

    def _save(self, call: Call) -> None:
        saved = self.region.saved[self.seen]
        self.seen += 1
        number = self._meant(saved.storage)
        self.holds.hold(number)
        self.graph[key_of(call)].append(number)
        if not saved.given_up:
            saved.holds = number
            self.holds.hold(number)

