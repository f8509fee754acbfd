"""The largest batch, sequence, depth, width and member that fit: each exactly, each as `account` says."""

from __future__ import annotations

import dataclasses
import json

import pytest

from preflop.accounting import find_device, memory_of
from preflop.cli.main import run
from preflop.errors import BadSubject, PreflopError
from preflop.fitting import fit_model
from preflop.models.catalog import find
from preflop.models.family import head_step, members, with_heads, with_layers
from preflop.plan.fit import Answer, Need, What, largest
from preflop.report.fit import fit_text
from preflop.tape.events import Tape
from preflop.units import bytes_text

L4 = "l4"


def answer(kind: What, model: str = "gpt2-nano", **options: object) -> Answer:
    (found,) = fit_model(model, device=L4, what=(kind,), **options)  # type: ignore[arg-type]
    return found


def spare(tape: Tape) -> int:
    device = find_device(L4)
    assert device is not None
    bytes_ = memory_of(tape, device).spare_bytes
    assert bytes_ is not None
    return bytes_


def test_memory_alone_is_the_accounts() -> None:
    """`memory_of` == the memory of the account, `fits` and reserved bytes included."""
    import preflop

    account = preflop.account("gpt2-nano", {"batch_size": 4, "sequence_length": 64}, device=L4)
    device = find_device(L4)
    assert device is not None
    found = memory_of(account.tape, device)
    for part in ("peak_bytes", "reserved_bytes", "fits", "spare_bytes"):
        assert getattr(found, part) == getattr(account.memory, part)


def test_the_batch_fits_and_one_more_does_not() -> None:
    """gpt2-nano on an L4: `account` says fits at n and not at n + 1."""
    import preflop

    answered = answer(What.BATCH, seq=64)
    found = answered.found
    assert found.fits is not None
    assert found.one_more is not None
    assert found.one_more.size == found.fits.size + 1
    for need, fits in ((found.fits, True), (found.one_more, False)):
        size = {"batch_size": need.size, "sequence_length": 64}
        memory = preflop.account("gpt2-nano", size, device=L4).memory
        assert (memory.fits, memory.spare_bytes) == (fits, need.spare_bytes)
        assert need.needs_bytes == (memory.reserved_bytes or 0) + (memory.context_bytes or 0)
        assert f"needs {bytes_text(need.needs_bytes)}" in fit_text([answered], "gpt2-nano", L4)


def test_the_sequence_ends_at_the_position_table() -> None:
    """All 256 positions of gpt2-nano fit: the answer is 256, and says why there is no more."""
    found = answer(What.SEQ, batch=2)
    assert found.found.fits is not None
    assert found.found.fits.size == 256
    assert found.found.one_more is None
    assert found.limit == "gpt2-nano has 256 positions"
    assert found.found.tried == 1


@pytest.mark.long
def test_the_sequence_is_cut_where_memory_ends() -> None:
    """A batch that fills the L4 before the table ends: n fits, n + 1 does not."""
    found = answer(What.SEQ, batch=2000).found
    assert found.fits is not None
    assert found.one_more is not None
    assert found.one_more.size == found.fits.size + 1 < 256
    assert found.fits.spare_bytes >= 0 > found.one_more.spare_bytes


@pytest.mark.long
def test_the_depth_is_that_of_the_recorded_member() -> None:
    """Blocks repeated on the tape == the deeper model recorded anew, at n and at n + 1."""
    from preflop.fitting import _Search
    from preflop.folding import tape_of

    found = answer(What.DEPTH, batch=2000, seq=64).found
    assert found.fits is not None
    assert found.one_more is not None
    assert found.one_more.size == found.fits.size + 1
    device = find_device(L4)
    assert device is not None
    search = _Search("gpt2-nano", device, 2000, {"seq": 64}, None, {}, lambda words: None)
    subject = search._subject(2000, (64,))
    for need in (found.fits, found.one_more):
        tape = tape_of(search._as(subject, with_layers(find("gpt2-nano"), need.size)))
        assert spare(tape) == need.spare_bytes


@pytest.mark.long
def test_the_width_fits_and_the_next_does_not() -> None:
    """Heads of one width: n fits, the next member does not."""
    found = answer(What.WIDTH, batch=1500, seq=64).found
    assert found.fits is not None
    assert found.one_more is not None
    assert found.one_more.size == found.fits.size + head_step(find("gpt2-nano"))
    assert found.fits.spare_bytes >= 0 > found.one_more.spare_bytes
    assert found.fits.words == f"hidden size {with_heads(find('gpt2-nano'), found.fits.size).hidden}"


def test_the_member_fits_and_the_next_does_not() -> None:
    """GPT-2 family on an L4 in fp32: large fits, xl does not."""
    found = answer(What.MEMBER, "gpt2", seq=128).found
    assert found.fits is not None
    assert found.one_more is not None
    assert (found.fits.words, found.one_more.words) == ("gpt2-large", "gpt2-xl")


# -- the search -------------------------------------------------------------------------------------


def stairs(capacity: int, jumps: dict[int, int]) -> object:
    """Bytes that grow by steps: 10 per size, and more from some sizes on."""

    def need(size: int) -> Need:
        peak = 10 * size + sum(extra for at, extra in jumps.items() if size >= at)
        return Need(size, peak, capacity - peak)

    return need


@pytest.mark.parametrize("last_first", [False, True])
def test_search_in_steps_up_to_a_last_size(last_first: bool) -> None:
    """Sizes 4, 8, ..., 40: the largest that fits; the last where all fit; none where the first does not."""
    options = {"least": 4, "step": 4, "most": 43, "last_first": last_first}
    found = largest(stairs(250, {13: 30}), **options)  # type: ignore[arg-type]
    assert (found.fits.size, found.one_more.size) == (20, 24)  # type: ignore[union-attr]
    found = largest(stairs(1000, {}), **options)  # type: ignore[arg-type]
    assert (found.fits.size, found.one_more) == (40, None)  # type: ignore[union-attr]
    found = largest(stairs(39, {}), **options)  # type: ignore[arg-type]
    assert (found.fits, found.one_more.size) == (None, 4)  # type: ignore[union-attr]


def test_last_first_asks_once_where_all_fit() -> None:
    """The largest size fits: nothing else is priced."""
    assert largest(stairs(10**6, {}), most=1024, last_first=True).tried == 1  # type: ignore[arg-type]


# -- families ---------------------------------------------------------------------------------------


def test_a_wider_member_keeps_its_ratios() -> None:
    """Llama-3-8B at 64 heads: twice the hidden size, key-value heads and feed-forward; heads as wide."""
    before, after = find("llama-3-8b"), with_heads(find("llama-3-8b"), 64)
    assert (after.hidden, after.kv_heads, after.ffn) == (2 * before.hidden, 16, 2 * 14336)
    assert after.head_dim == before.head_dim


def test_its_own_heads_and_layers_are_the_member_itself() -> None:
    """with_heads(own heads) and with_layers(own layers) change nothing but the name."""
    for facts in (find("gpt2"), find("llama-3-70b"), find("bert-base")):
        assert dataclasses.replace(with_heads(facts, facts.needed("heads")), name=facts.name) == facts
        assert dataclasses.replace(with_layers(facts, facts.layers), name=facts.name) == facts


def test_members_that_read_so_far() -> None:
    """A family's members whose position table is shorter are left out."""
    assert "gpt2-nano" not in [member.name for member in members(find("gpt2"), 512)]


# -- bad input --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("fit gpt2 --device l4 --what bath", "All: batch, seq, source, target, frames, depth, width, member, all."),
        ("fit gpt2 --device l4 --seq 2048 --what batch", "gpt2 has 1024 positions"),
        ("fit resnet-50 --device l4 --seq 8 --what batch", "resnet-50 has no seq (--seq)"),
        ("fit resnet-50 --device l4 --what depth", "resnet-50 has no depth to search"),
        ("fit resnet-50 --device l4 --what seq", "resnet-50 has no seq to search"),
        ("fit gpt3 --device l4", "no model named 'gpt3'"),
        ("fit --device l4 --what batch", "--what batch needs a model"),
        ("fit gpt2 --device l4 --batch 0", "--batch"),
    ],
)
def test_bad_input_is_one_message(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each ends with status 2 and says what to do."""
    assert run(words.split()) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.out == ""


def test_a_cpu_has_no_memory_to_fill() -> None:
    """fit on a cpu is an error, not an answer."""
    with pytest.raises(PreflopError, match="cpu has no figures in the catalog"):
        fit_model("gpt2-nano", device="cpu")


def test_a_configuration_has_no_family(tmp_path: object) -> None:
    """Depth of a config.json: refused with what can be asked instead."""
    from pathlib import Path

    folder = Path(str(tmp_path))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_positions": 64}))
    with pytest.raises(BadSubject, match="is no named model"):
        fit_model(str(folder), device=L4, what=(What.DEPTH,))
