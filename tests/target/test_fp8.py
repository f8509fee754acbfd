"""`--precision fp8`: what Transformer Engine's linears keep, multiply and cast, counted by hand on a small stack."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import preflop
from preflop.account import Account
from preflop.cli.main import run
from preflop.errors import BadSubject
from preflop.hardware.device import MissingFigure
from preflop.record.fp8 import AMAX_HISTORY_LENGTH, any_layout, workspace_bytes
from preflop.tape.events import Role

WIDTH, INNER, CLASSES, BLOCKS = 32, 64, 10, 2
BATCH, LENGTH = 4, 16
ROWS = BATCH * LENGTH
LINEARS = 2 * BLOCKS
INVERSE_BYTES = 4


class Block(nn.Module):
    """Two linears that fp8 takes."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER, bias=bias)
        self.down = nn.Linear(INNER, WIDTH, bias=bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """A residual feed-forward."""
        return hidden + self.down(torch.relu(self.up(hidden)))


class Stack(nn.Module):
    """Blocks and a head, which stays in 16 bits."""

    def __init__(self, bias: bool = False, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(bias) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Class scores of each position."""
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def account(precision: str = "fp8", device: str = "h100-sxm", rows: int = LENGTH, **options: object) -> Account:
    """The stack's account."""
    model = options.pop("model", None) or Stack()
    return preflop.account(model, torch.zeros(BATCH, rows, WIDTH), precision=precision, device=device, **options)  # type: ignore[arg-type]


def bytes_of(step: Account, dtype: str) -> int:
    """Of the activations in a dtype."""
    found = step.memory.columns.activations.dtypes.get(dtype)
    return 0 if found is None else found[0]


@pytest.mark.parametrize(("device", "weight_copies"), [("h100-sxm", 2), ("l4", 2), ("b200", 1)])
def test_what_backward_keeps_in_8_bits(device: str, weight_copies: int) -> None:
    """Each linear its input (transposed or not) and its weight, the weight's transpose too where it is needed."""
    inputs = ROWS * WIDTH + ROWS * INNER
    weights = weight_copies * 2 * WIDTH * INNER
    unturned = (weight_copies - 1) * WIDTH * INNER  # the batch wants no gradient: nobody reads that transpose
    assert bytes_of(account(device=device), "float8_e4m3fn") == BLOCKS * (inputs + weights) - unturned


def test_nothing_else_is_kept_for_a_linear_but_two_scales() -> None:
    """Against bf16-mixed: copies in bf16 of the blocks' weights and of `up`'s input are gone; scales are new.

    ReLU keeps its own result in bf16 in both, and the head is as it was.
    """
    weights = 2 * BLOCKS - 1  # the first one's input wants no gradient, for which a copy would be kept
    gone = 2 * (weights * WIDTH * INNER + BLOCKS * ROWS * WIDTH)
    assert bytes_of(account("bf16-mixed"), "bfloat16") - bytes_of(account(), "bfloat16") == gone
    new = LINEARS * 2 * INVERSE_BYTES
    assert bytes_of(account(), "float32") - bytes_of(account("bf16-mixed"), "float32") == new


def test_scales_histories_and_workspace_are_buffers() -> None:
    """Of each linear 5 scales and 5 x 1024 largest values in fp32; one workspace for all of them."""
    buffers = account().memory.columns.buffers.bytes - account("bf16-mixed").memory.columns.buffers.bytes
    assert buffers == LINEARS * 5 * 4 * (1 + AMAX_HISTORY_LENGTH) + workspace_bytes((9, 0))


@pytest.mark.parametrize("bias", [False, True])
def test_flops_are_those_of_bf16(bias: bool) -> None:
    """Model FLOPs by kind are equal; those of the blocks are scaled products, three to a linear but the first."""
    fp8, bf16 = (account(precision, model=Stack(bias)) for precision in ("fp8", "bf16-mixed"))
    assert fp8.flops.model == bf16.flops.model
    assert fp8.flops.unknown == {}
    scaled = {(row.op, row.dtype) for row in fp8.operators if row.op == "aten._scaled_mm"}
    assert scaled == {("aten._scaled_mm", "float8_e4m3fn"), ("aten._scaled_mm", "float8_e5m2")}
    one = 2 * ROWS * WIDTH * INNER
    assert sum(row.flops for row in fp8.operators if row.op == "aten._scaled_mm") == one * (3 * LINEARS - 1)


def test_casts_read_once_and_write_twice() -> None:
    """A gradient of `down`: read in bf16, written as it is and transposed; a scale read and a maximum written."""
    (row,) = (
        row for row in account().operators
        if row.op == "preflop.fp8_cast_transpose" and row.module == "blocks.*.down" and row.phase == "backward"
    )  # fmt: skip
    gradient = ROWS * WIDTH
    assert row.calls == BLOCKS
    assert row.read_bytes == BLOCKS * (2 * gradient + 4)
    assert row.write_bytes == BLOCKS * (2 * gradient + INVERSE_BYTES + 4)


def test_linears_run_at_the_fp8_peak() -> None:
    """Most FLOPs of a wide stack are fp8's, so that is the peak of its MFU."""
    time = account().time
    assert (time.peak_dtype, time.peak_flops_per_s) == ("float8", 1978.9e12)


def test_a_folded_stack_is_the_whole_one() -> None:
    """Eight blocks, of which fewer are recorded, hold what eight hold by hand."""
    each = ROWS * (WIDTH + INNER) + 2 * 2 * WIDTH * INNER
    assert bytes_of(account(model=Stack(blocks=8)), "float8_e4m3fn") == 8 * each - WIDTH * INNER


def test_recomputed_blocks_keep_nothing_in_8_bits() -> None:
    """Under recomputation the casts are made again, in backward."""
    step = account(recompute="block", model=Stack(blocks=4))
    assert bytes_of(step, "float8_e4m3fn") == 0
    assert any(row.op == "aten._scaled_mm" and row.phase == "recompute" for row in step.operators)


def test_a_frozen_weight_keeps_no_input() -> None:
    """As Transformer Engine: the input is needed for the weight's gradient alone."""
    model = Stack()
    for block in model.blocks:
        block.up.weight.requires_grad_(False)
    step = account(model=model)
    no_backward, unturned = 2 * WIDTH * INNER, WIDTH * INNER  # of the first block: `up`, and `down`'s transpose
    kept = BLOCKS * (ROWS * INNER + 2 * 2 * WIDTH * INNER) - no_backward - unturned
    assert bytes_of(step, "float8_e4m3fn") == kept


def test_rows_that_fp8_products_do_not_take_run_in_16_bits() -> None:
    """4 x 3 rows are no multiple of 8: said, and nothing in 8 bits."""
    step = account(rows=3)
    assert bytes_of(step, "float8_e4m3fn") == 0
    assert any("no multiple of 8" in words for words in step.assumptions)


def test_the_model_is_not_changed() -> None:
    """The user's linears stay linears."""
    model = Stack()
    account(model=model)
    assert type(model.blocks[0].up) is nn.Linear
    assert dict(model.named_buffers()) == {}


@pytest.mark.parametrize(("device", "words"), [("a100-80gb", "A100"), ("cpu", "cpu"), ("v100", "V100")])
def test_devices_without_fp8_are_refused(device: str, words: str) -> None:
    """One message that names the device and what to do."""
    with pytest.raises((BadSubject, MissingFigure), match=rf"(?s){words}.*no fp8 matrix units.*--precision bf16-mixed"):
        account(device=device)


def test_a_model_without_such_linears_is_refused() -> None:
    """The only linear of a model without blocks is its head."""
    with pytest.raises(BadSubject, match="no linear of Linear would compute in fp8"):
        preflop.account(nn.Linear(32, 32), torch.zeros(8, 32), precision="fp8", device="h100-sxm")


def test_layouts_by_compute_capability() -> None:
    """Transposes on Ada, Hopper and consumer Blackwell, none on data-centre Blackwell."""
    asked = ((8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (13, 0))
    assert [any_layout(one) for one in asked] == [False, False, True, True, False, True]


def test_buffers_of_a_linear_are_named() -> None:
    """The tape tells which linear a history belongs to."""
    names = {storage.name for storage in account().tape.storages if storage.role is Role.BUFFER}
    assert "blocks.1.down.fp8_amax_history_backward" in names


def test_reasons_why_not_6nd_follow_weights_through_casts() -> None:
    """A language model in fp8 has the reasons that it has in bf16."""
    size = {"batch_size": 1, "sequence_length": 64}
    fp8, bf16 = (
        preflop.account("gpt2-nano", size, precision=name, device="h100-sxm") for name in ("fp8", "bf16-mixed")
    )
    assert fp8.flops.differences == bf16.flops.differences


def test_training_in_fp8_is_refused() -> None:
    """`preflop train` has none of Transformer Engine's kernels: no run in another precision instead."""
    from preflop.errors import PreflopError
    from preflop.trainer.config import make_config

    with pytest.raises(PreflopError, match="`preflop train` does not run fp8"):
        make_config({"model": "gpt2-nano", "data": "d", "out": "o", "steps": 1, "precision": "fp8"})


def test_choices_are_exact_where_rows_are_taken_and_refused_elsewhere() -> None:
    """Sizes whose rows are a multiple of 8 follow polynomials; others run other kernels and are no such size."""
    from preflop.tape.sizes import NotPolynomial

    model = preflop.choices("gpt2-nano", recompute=("none",), precision="fp8", device="h100-sxm")
    size = {"batch_size": 3, "sequence_length": 104}
    exact = preflop.account("gpt2-nano", size, precision="fp8", device="h100-sxm").memory.peak_bytes
    assert model.evaluate(3, 104).peak_bytes == exact
    with pytest.raises(NotPolynomial):
        model.evaluate(3, 101)


def test_the_command_refuses_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    """A device without fp8: one message on standard error, nothing on standard output."""
    words = "account gpt2-nano --batch 2 --seq 64 --precision fp8 --device a100-80gb"
    assert run(words.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "A100 SXM4 80GB has no fp8 matrix units" in printed.err
