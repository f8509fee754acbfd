"""The account of a tape: composed from ledgers, timed, and bridged to 6ND."""

from __future__ import annotations

import json
from importlib import resources

import jsonschema
import pytest

from preflop.account import Account as Figures
from preflop.accounting import account_tape, find_device
from preflop.errors import UnknownDevice
from preflop.ledgers.six_nd import differences, six_nd
from preflop.ops.registry import Kind
from preflop.tape.events import Phase, Role, SubjectInfo, Tape
from tests.tapes import Builder, linear_step

H100 = find_device("h100-sxm")


def schema():
    return json.loads((resources.files("preflop.report") / "account.schema.json").read_text())


@pytest.mark.parametrize("device", [None, "h100-sxm", "mi300x", "tpu-v5e", "v100-sxm2-32gb"])
def test_json_follows_the_contract(device):
    """to_dict() passes the contract's schema, on any device and on none, and is plain JSON."""
    account = account_tape(linear_step(), None if device is None else find_device(device))
    told = json.loads(json.dumps(account.to_dict(), allow_nan=False))
    jsonschema.validate(told, schema())


def test_the_schema_check_can_fail():
    """The schema refuses an account without its memory: the test above is not idle."""
    told = account_tape(linear_step()).to_dict()
    del told["memory"]["peak_bytes"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(told, schema())


def test_sums_that_the_contract_promises():
    """at_peak sums to the peak; phases, kinds and operators' FLOPs each sum to flops.total."""
    told = account_tape(linear_step(), H100).to_dict()
    flops = told["flops"]
    assert sum(told["memory"]["at_peak"].values()) == told["memory"]["peak_bytes"]
    phases = ("forward", "backward", "recompute", "optimizer")
    assert sum(flops[phase] for phase in phases) == flops["total"]
    assert sum(flops["by_kind"].values()) == flops["total"]
    assert sum(row["flops"] for row in told["operators"]) == flops["total"]
    reads = sum(row["read_bytes"] for row in told["operators"])
    assert reads == told["traffic"]["read_bytes"]


def test_ledgers_by_name_sum_to_the_account():
    """Account.ledgers: the memory ledger's total is the peak, the traffic ledger's the bytes moved."""
    account = account_tape(linear_step())
    assert set(account.ledgers) == {"memory", "flops", "traffic", "copies"}
    assert account.ledgers["memory"].total() == account.memory.peak_bytes
    moved = account.traffic.read_bytes + account.traffic.write_bytes
    assert account.ledgers["traffic"].total() == moved
    assert isinstance(account, Figures)


def test_fits_counts_what_the_allocator_reserves():
    """On a CUDA device reserved >= peak, and fits compares it with what torch reports as memory."""
    memory = account_tape(linear_step(device="h100-sxm5-80gb"), H100).memory
    assert memory.reserved_bytes >= memory.peak_bytes
    assert memory.fits is True
    assert memory.spare_bytes == H100.memory_bytes - memory.reserved_bytes - memory.context_bytes


def test_an_unmeasured_context_is_not_taken_for_nothing():
    """Nobody measured an H100's CUDA context: the A100's 481 MiB stands in and the account says so."""
    account = account_tape(linear_step(device="h100-sxm5-80gb"), H100)
    assert account.memory.context_bytes == 481 * 2**20
    assert any("A100's 481.00 MiB stands in" in text for text in account.assumptions)
    tpu = account_tape(linear_step(), find_device("tpu-v5e"))
    assert tpu.memory.context_bytes is None


def test_too_large_does_not_fit_and_the_verdict_says_by_how_much():
    """A step with more bytes than the device has: fits is false, the verdict names what to change."""
    account = account_tape(linear_step(tokens=90_000_000, device="h100-sxm5-80gb"), H100)
    assert account.memory.fits is False and account.memory.spare_bytes < 0
    assert account.verdict.startswith("It does not fit, by ")
    assert "--recompute block" in account.verdict or "smaller batch" in account.verdict


def test_without_a_device_there_is_no_time():
    """On a CPU nothing is timed and nothing fits or not: null, never a guess."""
    told = account_tape(linear_step()).to_dict()
    assert told["device"] is None and told["memory"]["fits"] is None
    assert set(told["time"].values()) == {None}
    assert {row["time_s"] for row in told["operators"]} == {None}


def test_operators_are_sorted_by_time():
    """Largest time first."""
    account = account_tape(linear_step(), H100)
    times = [row.time_s for row in account.operators]
    assert times == sorted(times, reverse=True) and times[0] > 0


def test_cpu_is_no_device_and_unknown_names_are_refused():
    """"cpu" means no catalog figures; a misspelled name raises with the nearest."""
    assert find_device("CPU") is None
    with pytest.raises(UnknownDevice, match="h100-sxm"):
        find_device("h100-smx")


# --- 6ND


def test_linear_layer_differs_by_its_missing_input_gradient():
    """One layer on an input: 6ND promises 6·N·D; the first layer's input gradient, 2·N·D, is not done."""
    tape = linear_step()
    n, d = 256 * 256, 512
    (difference,) = differences(tape, 4 * n * d)
    assert six_nd(tape) == 6 * n * d
    assert difference.flops == -2 * n * d
    assert "no input gradient" in difference.why


def model_step(*, frozen: bool = False) -> Tape:
    """Embedding, two weights with a cast copy of one, scores between activations, a tied head's absence."""
    tokens, width = 64, 32
    b = Builder(phase=Phase.FORWARD)
    b.tape.subject = SubjectInfo("m", "bf16-mixed", None, 1, "none", "", tokens, 1, "cpu")
    table = b.parameter("emb.weight", (100, width), kind="Embedding")
    scale = b.parameter("norm.weight", (width,), kind="LayerNorm")
    first = b.parameter("a.weight", (width, width))
    second = b.parameter("b.weight", (width, width))
    ids = b.tensor((tokens,), Role.INPUT, "int64")
    (x,) = b.call("aten.embedding", [table, ids], [(tokens, width)])
    (x,) = b.call("aten.mul", [x, scale], [(tokens, width)])
    (cast,) = b.call("aten._to_copy", [first], [(width, width)])
    (y,) = b.call("aten.mm", [x, cast], [(tokens, width)])
    (scores,) = b.call("aten.mm", [y, b.call("aten.clone", [y], [(width, tokens)])[0]], [(tokens, tokens)])
    (y,) = b.call("aten.mm", [scores, y], [(tokens, width)])
    (z,) = b.call("aten.mm", [y, second], [(tokens, width)])
    b.phase = Phase.BACKWARD
    b.call("aten.mm", [z, second], [(tokens, width)])
    if not frozen:
        (turned,) = b.call("aten.clone", [y], [(width, tokens)])
        b.call("aten.mm", [turned, z], [(width, width)], role=Role.GRADIENT)
    b.call("aten.mm", [z, cast], [(tokens, width)])
    (turned,) = b.call("aten.clone", [x], [(width, tokens)])
    (low,) = b.call("aten.mm", [turned, z], [(width, width)])
    b.call("aten._to_copy", [low], [(width, width)], role=Role.GRADIENT)
    if frozen:
        import dataclasses

        b.tape.parameters[3] = dataclasses.replace(b.tape.parameters[3], trainable=False)
    return b.tape


@pytest.mark.parametrize("frozen", [False, True])
def test_differences_bridge_6nd_to_the_count(frozen):
    """6ND + the differences == model FLOPs, and each difference is what it says, by hand."""
    account = account_tape(model_step(frozen=frozen))
    flops = account.flops
    assert flops.six_nd + sum(item.flops for item in flops.differences) == flops.model
    told = {item.why.split(" (")[0]: item.flops for item in flops.differences}
    assert told["embeddings that are looked up and not multiplied"] == -6 * 3200 * 64
    assert told["norm scales and biases, which no matmul multiplies"] == -6 * 32 * 64
    scores = next(value for why, value in told.items() if why.startswith("matmuls between activations"))
    assert scores == 2 * (2 * 64 * 32 * 64)
    frozen_part = told.get("frozen parameters have no weight gradient", 0)
    assert frozen_part == (-2 * 32 * 32 * 64 if frozen else 0)


def test_no_tokens_no_rule():
    """Where a step has no tokens 6ND does not apply: null and no reasons."""
    account = account_tape(Tape(subject=None))
    assert account.flops.six_nd is None and account.flops.differences == ()


def test_unknown_operators_are_named():
    """An operator without a formula is listed with its calls, and the page and the terminal say so."""
    b = Builder(phase=Phase.FORWARD)
    x = b.tensor((4, 4), Role.INPUT)
    b.call("mylib.scan", [x], [(4, 4)])
    account = account_tape(b.tape)
    assert account.to_dict()["flops"]["unknown"] == {"mylib.scan": 1}
    assert Kind.OTHER.value in account.flops.by_kind


def test_a_sharded_account_is_one_ranks():
    """fsdp over 4: a quarter of the parameters, elements as bytes; the headline says on what."""
    import preflop
    from preflop.report.tables import headline

    size = {"batch_size": 2, "sequence_length": 32}
    whole = preflop.account("gpt2-nano", size, device="h100-sxm").memory.columns.parameters
    shared = preflop.account("gpt2-nano", size, device="h100-sxm", gpus=4, shard="fsdp")
    held = shared.memory.columns.parameters
    assert held.bytes == 4 * held.elements
    assert whole.bytes / 4 <= held.bytes < 1.01 * whole.bytes / 4
    assert "on each of 4 x H100 SXM5 80GB" in headline(shared)


@pytest.mark.parametrize("shard", ["ddp", "zero2", "fsdp"])
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_sharing_changes_no_reason_for_not_being_6nd(shard, precision):
    """A gathered weight is the weight, a scattered gradient its gradient: the reasons are those of one GPU."""
    import preflop

    size = {"batch_size": 2, "sequence_length": 32}
    alone = preflop.account("gpt2-nano", size, precision=precision, device="h100-sxm")
    shared = preflop.account("gpt2-nano", size, precision=precision, device="h100-sxm", gpus=4, shard=shard)
    assert shared.flops.differences == alone.flops.differences


def test_a_shared_step_says_so_on_a_cpu_too():
    """Without a device the headline still names the ranks."""
    import preflop
    from preflop.report.tables import headline

    size = {"batch_size": 1, "sequence_length": 8}
    assert "on each of 4 ranks, as a CPU runs it" in headline(preflop.account("gpt2-nano", size, gpus=4, shard="ddp"))


@pytest.mark.parametrize(
    ("precision", "microbatches", "said"), [("bf16", 4, True), ("bf16", 1, False), ("bf16-mixed", 4, False)]
)
def test_sums_in_16_bits_are_warned_of(precision, microbatches, said):
    """Gradients of microbatches that add up in bf16 lose small ones (L23); those in fp32 do not."""
    import preflop

    size = {"batch_size": 1, "sequence_length": 8}
    found = preflop.account("gpt2-nano", size, precision=precision, microbatches=microbatches)
    assert any("kept in bfloat16" in words for words in found.assumptions) == said
