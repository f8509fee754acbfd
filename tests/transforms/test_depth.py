"""The law of folding: deepen(record(few blocks)) == record(all blocks), event by event."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from preflop.folding import tape_of
from preflop.ledgers.flops import flops_totals
from preflop.ledgers.memory import memory
from preflop.record.subject_tape import record_cut, record_subject
from preflop.subject import Subject, resolve
from preflop.tape.replay import story
from preflop.transforms.depth import unfold

SIZE = {"batch_size": 2, "sequence_length": 32}
FAST = [
    ("gpt2", {}),
    ("gpt2", {"device": "h100-sxm", "precision": "bf16-mixed", "recompute": "selective"}),
    ("gpt2", {"recompute": "block", "microbatches": 2}),
    ("llama-3.2-1b", {"precision": "fp16-mixed", "microbatches": 2}),
    ("llama-3.2-1b", {"precision": "bf16-master", "optimizer": "adamw-foreach"}),
    ("pythia-160m", {"optimizer": "adafactor"}),
]
WHOLE = [
    ("gpt2", {"optimizer": "adamw-8bit", "device": "h100-sxm", "precision": "bf16"}),
    ("gpt2", {"optimizer": "adamw-8bit-in-backward"}),
    ("llama-3.2-1b", {"optimizer": "muon"}),
    ("bert-base", {"optimizer": "lion-in-backward", "precision": "bf16-master"}),
    ("gpt2", {"optimizer": "adamw-fused", "microbatches": 3}),
    ("gpt2", {"recompute": "selective"}),
    ("llama-3.2-1b", {"precision": "bf16-mixed"}),
    ("llama-3.2-1b", {"precision": "bf16-fp32-states"}),
    ("gemma-2-2b", {}),
    ("gemma-2-2b", {"device": "a100", "precision": "bf16"}),
    ("bert-base", {"optimizer": "momentum-foreach", "keep_output": True}),
    ("bert-base", {"optimizer": "sgd"}),
    ("vit-b-16", {"optimizer": "adagrad"}),
    ("qwen-2.5-0.5b", {"optimizer": "rmsprop"}),
]


def hold(subject: Subject) -> None:
    """The folded tape is the full one, and its ledgers agree."""
    whole, folded = record_subject(subject), tape_of(subject)
    assert not [line for line in folded.assumptions if "not folded" in line]
    assert story(folded) == story(whole)
    assert memory(folded).at_peak == memory(whole).at_peak
    assert memory(folded).columns == memory(whole).columns
    assert flops_totals(folded) == flops_totals(whole)
    names = [(info.name, info.shape, info.trainable) for info in whole.parameters]
    assert [(info.name, info.shape, info.trainable) for info in folded.parameters] == names


def named(name: str, options: dict) -> Subject:
    """A named model at the tests' size."""
    size = {"batch_size": 2} if name.startswith(("vit", "resnet")) else SIZE
    return resolve(name, size, **options)


@pytest.mark.parametrize(("name", "options"), FAST)
def test_folded_equals_full(name: str, options: dict) -> None:
    """Folded == full, to the byte and the FLOP."""
    hold(named(name, options))


@pytest.mark.long
@pytest.mark.parametrize(("name", "options"), WHOLE)
def test_folded_equals_full_whole(name: str, options: dict) -> None:
    """Folded == full for more architectures, optimizers and precisions."""
    hold(named(name, options))


class Block(nn.Module):
    """A small residual block."""

    def __init__(self, width: int = 16, hidden: int = 32, *, scale: float = 1.0, index: int = 0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.norm = nn.LayerNorm(width)
        self.scale, self.layer_idx = scale, index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x + scaled feed-forward."""
        return x + self.scale * self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """A stack of blocks with glue around them."""

    def __init__(self, blocks: list[nn.Module], *, every: bool = False) -> None:
        super().__init__()
        self.blocks, self.head, self.every = nn.ModuleList(blocks), nn.Linear(16, 4), every

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Blocks in order; with `every`, the mean of all their outputs."""
        outputs = []
        for block in self.blocks:
            x = block(x) * 1.5
            outputs.append(x)
        return self.head(torch.stack(outputs).mean(0) if self.every else x)


def folds(model: nn.Module, **options: object) -> bool:
    """Whether the model folds; either way its tape must be the full one."""
    subject = resolve(model, torch.randn(4, 16), **options)
    tape = tape_of(subject)
    assert story(tape) == story(record_subject(subject))
    stacks = record_cut(subject).stacks
    return bool(stacks) and not [line for line in tape.assumptions if "not folded" in line]


def test_equal_blocks_fold() -> None:
    """Blocks that differ in their index alone fold, with glue between them."""
    assert folds(Net([Block(index=i) for i in range(9)]))


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "bf16-master"])
@pytest.mark.parametrize("name", ["gpt2", "llama-3.2-1b", "qwen-2.5-0.5b", "pythia-160m", "bert-base", "vit-b-16"])
def test_equal_blocks_fold_one_by_one(name: str, precision: str) -> None:
    """A looping optimizer's memory too, though not all of its updates are recorded: no second recording is needed to
    fold blocks in pairs (Llama's gate and up are of one shape, and one of them stands for both)."""
    cut = record_cut(named(name, {"precision": precision, "optimizer": "adamw-loop"}), 1)
    assert cut.stacks
    assert unfold(cut).subject is not None


def test_alternating_blocks_fold_by_period() -> None:
    """a b a b ... folds with a period of two."""
    assert folds(Net([Block(hidden=32 + 16 * (i % 2), index=i) for i in range(16)]))


def test_a_different_first_block_is_left_out_of_the_fold() -> None:
    """A stack whose first block is wider folds the rest."""
    assert folds(Net([Block(hidden=64), *(Block(index=i) for i in range(8))]))


@pytest.mark.parametrize(
    "blocks",
    [
        [Block(hidden=16 + 8 * i) for i in range(8)],
        [Block(scale=1.0 + i) for i in range(8)],
    ],
    ids=["shapes", "attributes"],
)
def test_different_blocks_are_recorded_in_full(blocks: list[nn.Module]) -> None:
    """Blocks that differ in shape or in an attribute are not folded, and the tape says so."""
    assert not folds(Net(blocks))


def test_hooks_are_recorded_in_full() -> None:
    """A block with a hook may do anything: it is not folded."""
    blocks = [Block() for _ in range(8)]
    blocks[5].register_forward_hook(lambda module, args, output: output * 2)
    assert not folds(Net(blocks))


def test_shared_parameters_are_recorded_in_full() -> None:
    """One block used eight times shares its parameters: not folded."""
    block = Block()
    assert not folds(Net([block] * 8))


def test_data_that_skips_blocks_is_recorded_right() -> None:
    """Outputs of every block used at the end: folded or not, the tape is the full one."""
    folds(Net([Block(index=i) for i in range(9)], every=True))


def test_frozen_blocks_fold() -> None:
    """Frozen blocks make no weight gradients and have no states; all of them are frozen."""
    model = Net([Block(index=i) for i in range(8)])
    for parameter in model.blocks.parameters():
        parameter.requires_grad_(False)
    folds(model)


def test_the_model_is_left_whole() -> None:
    """Cutting happens on a copy: the user's model keeps all of its blocks."""
    model = Net([Block(index=i) for i in range(9)])
    folds(model)
    assert len(model.blocks) == 9
