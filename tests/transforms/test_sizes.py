"""The law of sizes: parametric(B, S) == record at B, S; and what ships is what is recorded."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import preflop
from preflop.axes import SEQ, Axis
from preflop.hardware.catalog import find
from preflop.models.catalog import models
from preflop.parametric import parametric_tapes
from preflop.record.fake import INTEGER_LIMIT_BYTES
from preflop.record.subject_tape import record_subject
from preflop.subject import Subject, resolve
from preflop.tape.lives import annotated
from preflop.tape.replay import story
from preflop.tape.sizes import BASIS, NotPolynomial, basis, formula, value
from preflop.tape.stack import CutTape
from preflop.tapes import store
from preflop.tapes.choose import shipped
from preflop.transforms.depth import unfold

whole = st.integers(min_value=1, max_value=10**4)


@given(whole, whole, st.lists(st.integers(-(10**6), 10**6), min_size=6, max_size=6))
def test_a_formula_says_its_value(batch: int, seq: int, coefficients: list[int]) -> None:
    """eval(formula(p)) == p's value."""
    text = formula(tuple(coefficients)).replace("^", "**")
    assert eval(text, {"B": batch, "S": seq}) == value(coefficients, basis(batch, seq))
    assert len(BASIS) == len(basis(batch, seq))


@pytest.mark.parametrize(
    ("name", "options", "sizes"),
    [
        ("gpt2", {"device": "h100-sxm", "precision": "bf16-mixed"}, [(4, 64), (1, 77), (7, 1024)]),
        ("vit-b-16", {}, [(4, None), (1, None)]),
    ],
)
def test_parametric_equals_recorded(name: str, options: dict, sizes: list) -> None:
    """parametric(B, S) == record at B, S, at sizes that were not fitted."""

    def at(batch: int, seq: int | None = None) -> Subject:
        size = {"batch_size": batch} | ({} if seq is None else {"sequence_length": seq})
        return resolve(name, size, **options)

    tapes = parametric_tapes(at, axes=() if sizes[0][1] is None else (Axis(SEQ, 1024),))
    for batch, seq in sizes:
        tape = next(tape for tape in tapes if tape.holds(batch, seq))
        made = unfold(CutTape(tape.at(batch, seq), tape.stacks, ()))
        assert story(made) == story(record_subject(at(batch, seq)))


def test_what_is_no_polynomial_is_refused() -> None:
    """A model that pads its sequence to a power of two has no such tape."""

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            target = 1 << (x.shape[1] - 1).bit_length()
            return self.line(nn.functional.pad(x, (0, 0, 0, target - x.shape[1])))

    with pytest.raises(NotPolynomial):
        parametric_tapes(lambda b, s: resolve(Padded, torch.randn(b, s, 8)))


HOPPER, AMPERE = "h100-sxm5-80gb", "a100-sxm4-80gb"
LARGEST_MASK = math.isqrt(INTEGER_LIMIT_BYTES)
"""Positions of the largest square of booleans that a recording computes."""


def ships(device: str) -> list[tuple[str, str, tuple[int, int | None]]]:
    """(model, precision, size) for one size in each tape that ships for the device, whose masks a fresh recording
    computes too."""
    cases = []
    for entry in store.index():
        if list(find(device).compute_capability) not in entry["capabilities"]:
            continue
        for name, domain in entry["models"].items():
            batch = domain["most_batch"] or 3
            seq, step, most = domain["least_seq"], domain["seq_multiple"], domain["most_seq"]
            if seq is not None:
                most = min(most or LARGEST_MASK, LARGEST_MASK)
                seq += step * min(61, (most - seq) // step)
            cases.append((name, entry["precision"], (batch, seq)))
    return sorted(set(cases), key=repr)


def hold_shipped(
    name: str, precision: str, size: tuple[int, int | None], device: str, recompute: str = "none"
) -> None:
    """The shipped tape == a fresh recording, but for `aten.detach` (see test_recompute.py)."""
    batch = {"batch_size": size[0]} | ({} if size[1] is None else {"sequence_length": size[1]})
    subject = resolve(name, batch, precision=precision, device=device, recompute=recompute)
    tape = shipped(subject)
    assert tape is not None
    fresh = record_subject(subject)
    assert story(tape, without={"aten.detach"}) == story(fresh, without={"aten.detach"})
    assert tape.subject is not None
    assert fresh.subject is not None
    assert tape.subject.batch == fresh.subject.batch
    assert tape.subject.tokens == fresh.subject.tokens


def test_pairs_of_a_window_are_known_where_no_mask_was_computed() -> None:
    """Mistral at 12,032 positions and a window of 4,096: a fresh recording does not compute a mask so large, and
    does not know what is attended; what ships does, by the polynomial."""
    seq, window = 12_032, 4_096
    assert seq > LARGEST_MASK
    size = {"batch_size": 3, "sequence_length": seq}
    tape = shipped(resolve("mistral-7b", size, precision="bf16", device=AMPERE))
    assert tape is not None
    pairs = {s.attended_pairs for s in tape.signatures if "attention" in s.op}
    assert pairs == {3 * (seq * window - window * (window - 1) // 2)}


SMALL = {"gpt2-nano", "gpt2", "qwen-2.5-0.5b", "pythia-160m", "bert-base", "vit-b-16"}


@pytest.mark.parametrize(("name", "precision", "size"), [c for c in ships(HOPPER) if c[0] in SMALL][::3])
def test_a_sample_of_what_ships_is_what_is_recorded(
    name: str, precision: str, size: tuple[int, int | None]
) -> None:
    """Shipped == recorded afresh, on a Hopper."""
    hold_shipped(name, precision, size, HOPPER)


@pytest.mark.parametrize("recompute", ["block", "selective", "block:2"])
@pytest.mark.parametrize(("name", "precision", "size"), [c for c in ships(HOPPER) if c[0] in SMALL][::7])
def test_what_ships_answers_recomputation(
    name: str, precision: str, size: tuple[int, int | None], recompute: str
) -> None:
    """Shipped and transformed == recorded with recomputation, on a Hopper."""
    hold_shipped(name, precision, size, HOPPER, recompute)


@pytest.mark.long
@pytest.mark.parametrize("recompute", ["block", "selective"])
@pytest.mark.parametrize(("name", "precision", "size"), ships(AMPERE)[::5])
def test_more_of_what_ships_answers_recomputation(
    name: str, precision: str, size: tuple[int, int | None], recompute: str
) -> None:
    """The same for a fifth of all that ships, on an Ampere."""
    hold_shipped(name, precision, size, AMPERE, recompute)


def test_all_that_ships_says_what_held_its_tensors() -> None:
    """Every shipped tape is annotated, so that none has to be recorded for recomputation."""
    files = {entry["file"]: next(iter(entry["models"])) for entry in store.index()}
    assert [file for file, name in files.items() if not annotated(store.annotated(file, name).tape)] == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("device", "name", "precision", "size"),
    [(device, *case) for device in (HOPPER, AMPERE, "rtx-4090") for case in ships(device)],
)
def test_all_that_ships_is_what_is_recorded(
    device: str, name: str, precision: str, size: tuple[int, int | None]
) -> None:
    """Every shipped tape == recorded afresh, on three kinds of device."""
    hold_shipped(name, precision, size, device)


def test_every_named_model_ships() -> None:
    """Each named model has tapes in fp32, bf16-mixed and bf16."""
    have = {(name, entry["precision"]) for entry in store.index() for name in entry["models"]}
    assert have == {(f.name, p) for f in models() for p in ("fp32", "bf16-mixed", "bf16")}


def test_what_ships_is_small() -> None:
    """Every file under 100 kB, all together under 2 MB."""
    sizes = [len(store._data(entry["file"])) for entry in store.index()]
    assert max(sizes) < 100_000
    assert sum(sizes) < 2_000_000


@pytest.mark.parametrize("recompute", ["none", "block", "selective", "blocks.*.feed_forward"])
def test_a_named_model_is_answered_without_torch(recompute: str) -> None:
    """`preflop account llama-3-70b ...` imports no torch, recomputing or not."""
    code = (
        "import sys, json, preflop\n"
        "a = preflop.account('llama-3-70b', {'batch_size': 4, 'sequence_length': 8192}, device='h100-sxm',"
        f" recompute={recompute!r})\n"
        "print(json.dumps(['torch' in sys.modules, a.memory.peak_bytes]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported, peak = json.loads(done.stdout)
    assert not imported
    assert peak > 70e9 * 16


def test_an_unshipped_question_is_recorded() -> None:
    """Another optimizer has no shipped tape: it is recorded, and priced all the same."""
    subject = resolve("gpt2-nano", {"batch_size": 2, "sequence_length": 16}, device="h100-sxm5-80gb",
                      optimizer="sgd")  # fmt: skip
    assert shipped(subject) is None
    size = {"batch_size": 2, "sequence_length": 16}
    assert preflop.account("gpt2-nano", size, device="h100-sxm", optimizer="sgd").memory.peak_bytes > 0
