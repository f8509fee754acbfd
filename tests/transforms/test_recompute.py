"""The law of recomputation: recompute(record(s), how) == record(s with recompute=how), event by event.

Left out of the comparison are calls of `aten.detach`, which move and cost nothing: torch makes one where it
wraps a saved tensor anew, which it does at other moments with hooks than without.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from preflop.axes import SEQ, Axis
from preflop.errors import BadSubject
from preflop.folding import tape_of
from preflop.ledgers.flops import flops_totals
from preflop.ledgers.memory import memory
from preflop.ledgers.traffic import traffic_ledger
from preflop.parametric import parametric_tapes
from preflop.recomputation import alike
from preflop.record.subject_tape import record_cut, record_subject
from preflop.subject import Subject, resolve
from preflop.tape import lives
from preflop.tape.events import Tape
from preflop.tape.file import tape_from_json, tape_to_json
from preflop.tape.replay import story
from preflop.tape.sizes import ParametricTape
from preflop.tape.stack import CutTape, Refused
from preflop.transforms.accumulation import accumulate
from preflop.transforms.depth import unfold
from preflop.transforms.recompute import recompute, recompute_at_any_size
from tests.zoo.members import MEMBERS

H100 = {"device": "h100-sxm"}
NAMED = [
    ("gpt2", {"precision": "bf16-mixed", **H100}, ["block", "selective", "block:2"]),
    ("llama-3.2-1b", {"precision": "bf16", **H100}, ["block", "selective"]),
    ("bert-base", {"precision": "fp16-mixed"}, ["block", "selective"]),
    ("vit-b-16", {"optimizer": "sgd"}, ["block", "selective:3"]),
]
NAMED_WHOLE = [
    ("gpt2", {"microbatches": 3, "keep_output": True}, ["block", "selective", "blocks.*.feed_forward"]),
    ("gemma-2-2b", {"precision": "bf16-mixed"}, ["block", "selective"]),
    ("pythia-160m", {"precision": "bf16-master", "microbatches": 2}, ["block", "selective:**.attention"]),
    ("qwen-2.5-0.5b", {"precision": "bf16-fp32-states", "device": "a100"}, ["block", "selective"]),
    ("resnet-50", {}, ["block", "selective"]),
]
ZOO = ["gpt2-plain", "experts-plain", "nn-transformer", "lstm", "resnext-grouped"]
ZOO_WHOLE = [
    "gpt2-hf", "gpt2-manual-attention", "llama-hf", "neox-hf", "mistral-sliding-window-hf", "mixtral-hf",
    "bert-hf", "t5-hf", "vit-hf", "vit-plain", "unet", "gru", "audio-weight-norm", "shared-layers",
    "custom-function", "inplace-batch-norm-dict", "autocast-bf16-resnext", "autocast-bf16-llama-hf",
    "embedding-bags", "multihead-attention",
]  # fmt: skip


def same(made: Tape, recorded: Tape) -> None:
    """The two tapes tell one step, and their ledgers agree."""
    assert story(made, without={"aten.detach"}) == story(recorded, without={"aten.detach"})
    ours, theirs = memory(made), memory(recorded)
    assert (ours.peak_bytes, ours.first_step_peak_bytes) == (theirs.peak_bytes, theirs.first_step_peak_bytes)
    assert (ours.at_peak, ours.columns) == (theirs.at_peak, theirs.columns)
    assert flops_totals(made) == flops_totals(recorded)
    assert traffic_ledger(made).by("phase") == traffic_ledger(recorded).by("phase")
    assert made.subject == recorded.subject


def named(name: str, **options: Any) -> Subject:
    """A named model at the tests' size."""
    size = {"batch_size": 2} | ({} if name.startswith(("vit", "resnet")) else {"sequence_length": 32})
    return resolve(name, size, **options)


def hold_named(name: str, options: dict[str, Any], hows: list[str]) -> None:
    """The law for the whole model, folded where it folds."""
    cut = record_cut(named(name, **options), lives=True)
    for how in hows:
        recorded = tape_of(named(name, recompute=how, **options))
        if alike(how):
            made = unfold(dataclasses.replace(cut, tape=recompute(cut.tape, how=how)))
        else:
            made = recompute(unfold(cut), how=how)
        same(made, recorded)


@pytest.mark.parametrize(("name", "options", "hows"), NAMED)
def test_transformed_equals_recorded(name: str, options: dict[str, Any], hows: list[str]) -> None:
    """recompute(record(s), how) == record(s, recompute=how), before the fold or after it."""
    hold_named(name, options, hows)


@pytest.mark.long
@pytest.mark.parametrize(("name", "options", "hows"), NAMED_WHOLE)
def test_transformed_equals_recorded_whole(name: str, options: dict[str, Any], hows: list[str]) -> None:
    """The same for more architectures, precisions and microbatches."""
    hold_named(name, options, hows)


def outermost(name: str) -> bool:
    """The model's own children."""
    return "." not in name


def annotated_member(name: str) -> tuple[Callable[..., Subject], Tape]:
    """A member of the zoo as a subject, and its annotated tape, recorded in full."""
    member = next(member for member in MEMBERS if member.name == name)
    if "hugging_face" in getattr(member.model, "__module__", ""):
        pytest.importorskip("transformers")

    def subject(**changed: Any) -> Subject:
        return resolve(member.model, member.batch, **{**member.keywords(), **changed})

    return subject, record_subject(subject(), lives=True)


def hold_member(name: str) -> None:
    """The law for a member of the zoo."""
    subject, tape = annotated_member(name)
    same(lives.plain(tape), record_subject(subject()))
    hows: list[str | Callable[[str], bool]] = ["block", "selective", outermost]
    for how in hows:
        try:
            recorded = record_subject(subject(recompute=how))
        except BadSubject as reason:
            with pytest.raises(BadSubject) as raised:
                recompute(tape, how=how)
            assert str(raised.value) == str(reason)
        else:
            same(recompute(tape, how=how), recorded)


@pytest.mark.parametrize("name", ZOO)
def test_members_of_the_zoo(name: str) -> None:
    """The law for blocks, selectively, and for the model's children; and the notes do not move the step."""
    hold_member(name)


@pytest.mark.long
@pytest.mark.parametrize("name", ZOO_WHOLE)
def test_members_of_the_zoo_whole(name: str) -> None:
    """The same for encoder-decoders, mixtures of experts, recurrent and convolutional models."""
    hold_member(name)


def test_accumulation_and_recomputation_commute() -> None:
    """accumulate . recompute == recompute . accumulate == record both."""
    tape = unfold(record_cut(named("gpt2"), lives=True))
    recorded = tape_of(named("gpt2", recompute="block", microbatches=3))
    same(recompute(accumulate(tape, microbatches=3), how="block"), recorded)
    same(accumulate(recompute(tape, how="block"), microbatches=3), recorded)


@pytest.mark.parametrize("how", ["block", "selective", "block:3"])
def test_sizes_stay_symbols(how: str) -> None:
    """recompute(parametric).at(B, S) == record at B, S with recomputation, at sizes that were not fitted."""
    for batch, seq in ((7, 77), (4, 1024)):
        tape = next(tape for tape in annotated_at_any_size() if tape.holds(batch, seq))
        made = recompute_at_any_size(tape, how=how)
        whole = unfold(CutTape(made.at(batch, seq), made.stacks, ()))
        same(whole, tape_of(gpt2_at(batch, seq, how)))


def gpt2_at(batch: int, seq: int | None, recompute: str = "none") -> Subject:
    """GPT-2 on a Hopper."""
    size = {"batch_size": batch, "sequence_length": seq}
    return resolve("gpt2", size, precision="bf16-mixed", recompute=recompute, **H100)


@lru_cache(maxsize=1)
def annotated_at_any_size() -> list[ParametricTape]:
    """Its annotated tapes, recorded once for all tests."""
    return parametric_tapes(gpt2_at, axes=(Axis(SEQ, 1024),), lives=True)


# -- small models -----------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self, width: int = 16, *, in_place: bool = False, keeps: bool = False) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] | None = [] if keeps else None
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 64), nn.Linear(64, width)
        self.drop, self.act = nn.Dropout(0.1), nn.ReLU(inplace=in_place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x + a feed-forward."""
        if self.kept is not None:
            self.kept[:] = [x * 2]
        return x + self.drop(self.down(self.act(self.up(self.norm(x)))))


class Net(nn.Module):
    """Blocks between an embedding and a head, tied; what runs a block again may be the model itself."""

    def __init__(self, blocks: int = 3, *, reentrant: bool | None = None, **options: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 16)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(blocks))
        self.head = nn.Linear(16, 100, bias=False)
        self.head.weight = self.embed.weight
        self.reentrant = reentrant

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def net(recompute: Any = "none", **options: Any) -> Subject:
    """A step of the small model."""
    return resolve(lambda: Net(**options), torch.randint(100, (4, 8)), recompute=recompute)


@pytest.mark.parametrize(
    ("how", "chosen"),
    [
        ("block", [0, 1, 2]),
        ("block:2", [1]),
        ("blocks.[02]", [0, 2]),
        (lambda name: name == "blocks.1", [1]),
        ("selective:blocks.2", [2]),
    ],
    ids=["block", "every second", "pattern", "callable", "selective pattern"],
)
def test_which_modules_run_again(how: Any, chosen: list[int]) -> None:
    """The chosen blocks' modules, and no others, are seen in the recomputation, as recorded."""
    made = recompute(record_subject(net(), lives=True), how=how)
    same(made, record_subject(net(how)))
    again = {made.modules[call.module] for call in made.calls if call.phase.value == "recompute"}
    assert {int(path.split(".")[1]) for path in again if path.startswith("blocks.")} == set(chosen)


def test_recomputation_stops_early() -> None:
    """The last saved tensor of a block is dropout's mask, made by dropout: what follows it is not run again,
    so there is one `add` less in the recomputation than in forward, per block."""
    made = recompute(record_subject(net(), lives=True), how="block")

    def adds(phase: str) -> int:
        return sum(
            made.signatures[call.signature].op == "aten.add"
            for call in made.steady()
            if call.phase.value == phase
        )

    assert (adds("forward"), adds("recompute")) == (3, 0)


def test_the_reentrant_kind_is_recorded_as_torch_runs_it() -> None:
    """recompute="block-reentrant" == a model that calls checkpoint(use_reentrant=True) itself: no early stop,
    a random state and the inputs held, and a backward within backward."""
    asked, own = record_subject(net("block-reentrant")), record_subject(net(reentrant=True))
    assert memory(asked).peak_bytes == memory(own).peak_bytes
    assert memory(asked).at_peak == memory(own).at_peak
    assert flops_totals(asked) == flops_totals(own)
    assert traffic_ledger(asked).total() == traffic_ledger(own).total()
    block = record_subject(net("block"))
    assert flops_totals(asked).recompute > flops_totals(block).recompute


def test_none_is_the_plain_tape() -> None:
    """recompute(tape, "none") == the tape without its notes; a plain tape is itself."""
    tape = record_subject(net(), lives=True)
    made = recompute(tape, how="none")
    assert not lives.annotated(made) and lives.annotated(tape)
    assert lives.plain(made) is made
    same(made, record_subject(net()))


def test_notes_survive_the_file() -> None:
    """load(save(annotated)) == annotated."""
    tape = record_subject(net(), lives=True)
    assert tape_from_json(tape_to_json(tape)) == tape


@pytest.mark.parametrize("op", [lives.DROP, lives.LET_GO, lives.UNPACK, lives.SAVE])
def test_missing_notes_are_seen(op: str) -> None:
    """The comparison can fail: without one kind of notes, where the step has it, the result is refused or is
    another tape."""
    tape, recorded = record_subject(net(), lives=True), record_subject(net("block"))
    without = {number for number, signature in enumerate(tape.signatures) if signature.op == op}
    numbers = [n for n, call in enumerate(tape.calls) if call.signature not in without]
    places = {-1: -1} | {old: new for new, old in enumerate(numbers)}
    deaf = dataclasses.replace(
        tape,
        calls=[tape.calls[number] for number in numbers],
        storages=[dataclasses.replace(storage, call=places[storage.call]) for storage in tape.storages],
    )
    if not without:
        same(recompute(deaf, how="block"), recorded)
        return
    with pytest.raises((AssertionError, Refused, IndexError)):
        same(recompute(deaf, how="block"), recorded)


@pytest.mark.parametrize(
    ("tape", "how", "reason"),
    [
        (lambda: record_subject(net()), "block", "does not say what held"),
        (lambda: record_subject(net(keeps=True), lives=True), "block", "keeps a tensor"),
        (lambda: record_subject(net(reentrant=False), lives=True), "block", "recomputes by itself"),
        (lambda: record_subject(net(), lives=True), lambda name: name.startswith("blocks.1"), "inside another"),
        (lambda: record_subject(net(in_place=True), lives=True), "selective", "writes into"),
    ],
    ids=["no notes", "state", "own", "nested", "kept result written"],
)
def test_refused_by_name(tape: Callable[[], Tape], how: Any, reason: str) -> None:
    """Where torch's doing does not follow from the tape, the transform says so."""
    with pytest.raises(Refused, match=reason):
        recompute(tape(), how=how)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("transformer.h.*", r"no module matches 'transformer.h.\*'"),
        ("block:4", "every 4th block; the model has 3"),
        ("all", "recompute is 'all'"),
        ("block:0", "recompute is 'block:0'"),
        (lambda name: False, "recompute= chose no module"),
    ],
)
def test_bad_words(how: Any, words: str) -> None:
    """What chooses nothing is one clear error, the same from the recording and from the transform."""
    tape = record_subject(net(), lives=True)
    with pytest.raises(BadSubject, match=words):
        recompute(tape, how=how)
    with pytest.raises(BadSubject, match=words):
        record_subject(net(how))
