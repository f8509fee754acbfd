"""The law of sizes along named axes: parametric.at(batch, source=, target=, frames=) == recorded there."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import preflop
from preflop.axes import Axis, lengths_of, takes_sizes
from preflop.choosing import Formulas, choices, formulas
from preflop.cli.main import run
from preflop.errors import BadSubject
from preflop.fitting import fit_model
from preflop.parametric import parametric_tapes
from preflop.plan.fit import What
from preflop.plan.outcome import outcome_of
from preflop.record.subject_tape import record_subject
from preflop.subject import Subject, resized, resolve
from preflop.tape.replay import story
from preflop.tape.sizes import NotPolynomial, ParametricTape, basis, basis_names
from preflop.tape.stack import CutTape
from preflop.transforms.depth import unfold

SMALL = {"d_model": 32, "vocab_size": 100, "pad_token_id": 0, "decoder_start_token_id": 1}
CODER = {
    f"{part}_{name}": size
    for part in ("encoder", "decoder")
    for name, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
}
T5 = {
    **SMALL, "model_type": "t5", "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8,
    "architectures": ["T5ForConditionalGeneration"],
}  # fmt: skip
BART = {
    **SMALL, **CODER, "model_type": "bart", "max_position_embeddings": 1024,
    "architectures": ["BartForConditionalGeneration"],
}  # fmt: skip
WHISPER = {
    **SMALL, **CODER, "model_type": "whisper", "num_mel_bins": 8, "max_source_positions": 50,
    "max_target_positions": 448, "architectures": ["WhisperForConditionalGeneration"],
}  # fmt: skip
WAV2VEC2 = {
    "model_type": "wav2vec2", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "conv_dim": [16] * 7, "num_conv_pos_embeddings": 16, "mask_time_prob": 0.0,
    "num_conv_pos_embedding_groups": 4, "layerdrop": 0.0, "architectures": ["Wav2Vec2ForCTC"],
}  # fmt: skip


class Seq2Seq(nn.Module):
    """An LSTM reads, another writes, with attention over what was read."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(50, 16), nn.Linear(32, 50)
        self.encoder = nn.LSTM(16, 16, batch_first=True)
        self.decoder = nn.LSTM(16, 16, batch_first=True)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The loss of each next word."""
        read, state = self.encoder(self.words(source))
        wrote, _ = self.decoder(self.words(target), state)
        found = (wrote @ read.transpose(1, 2)).softmax(-1) @ read
        logits = self.out(torch.cat((wrote, found), -1))
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def sentences(batch: int, source: int, target: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two batches of words."""
    return torch.zeros(batch, source, dtype=torch.int64), torch.zeros(batch, target, dtype=torch.int64)


def configured(folder: Path, fields: dict[str, Any]) -> str:
    """A folder with this config.json."""
    pytest.importorskip("transformers")
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)


def hold(model: Any, batch: Any, sizes: list[tuple[int, ...]], **options: Any) -> list[ParametricTape]:
    """At sizes that were not fitted, the tape read off the fit is the one recorded there; so is what it says."""
    axes = resolve(model, batch, **options).regimes[0]

    def at(size: int, *lengths: int) -> Subject:
        return resolve(model, resized(batch, axes, size, lengths), **options)

    tapes = parametric_tapes(at, axes=axes)
    for size in sizes:
        named = {axis.name: length for axis, length in zip(axes, size[1:])}
        tape = next(tape for tape in tapes if tape.holds(size[0], **named))
        made = unfold(CutTape(tape.at(size[0], **named), tape.stacks, ()))
        recorded = record_subject(at(*size))
        assert story(made) == story(recorded)
        assert made.subject == recorded.subject
    return tapes


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        # What oneDNN keeps of an LSTM is padded: the fit is of multiples of 64.
        ([(4, 192, 64), (1, 320, 576)], {}),
        ([(4, 77, 33), (1, 300, 12)], {"device": "h100-sxm5-80gb", "precision": "bf16-mixed"}),
    ],
    ids=["cpu", "h100"],
)
def test_a_recurrent_model_at_any_source_and_target(sizes: list, options: dict[str, Any]) -> None:
    """LSTMs that read and write, with attention between: at(batch, source, target) == recorded."""
    batch = preflop.sized_batch(sentences, batch=2, source=5, target=3)
    hold(Seq2Seq, batch, sizes, **options)


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"device": "h100-sxm5-80gb", "precision": "bf16-mixed"}, marks=pytest.mark.long)],
    ids=["cpu", "h100"],
)
def test_bart_at_any_source_and_target(tmp_path: Path, options: dict[str, Any]) -> None:
    """An encoder and a decoder with cross attention, positions looked up."""
    batch = {"batch_size": 2, "source_length": 64, "target_length": 16}
    tapes = hold(configured(tmp_path, BART), batch, [(4, 77, 33), (1, 1024, 250)], **options)
    assert not tapes[-1].holds(2, source=1025, target=8)


@pytest.mark.long
@pytest.mark.parametrize(
    ("fields", "batch", "sizes"),
    [
        (T5, {"source_length": 64, "target_length": 16}, [(4, 77, 33), (1, 512, 250)]),
        (WHISPER, {"target_length": 16}, [(4, 33), (1, 448)]),
        (WAV2VEC2, {"frames": 16000, "target_length": 16}, [(4, 320 * 300, 33), (1, 320 * 999, 64)]),
        # Of a batch of another rest the convolutions have other lengths: it has a fit of its own.
        (WAV2VEC2, {"frames": 16123, "target_length": 16}, [(4, 320 * 300 + 123, 33)]),
    ],
    ids=["t5", "whisper", "wav2vec2", "wav2vec2 with a rest"],
)
def test_models_of_hugging_face_at_any_length(tmp_path: Path, fields: dict, batch: dict, sizes: list) -> None:
    """Relative positions; sound of one length and text; sound through convolutions with strides."""
    hold(configured(tmp_path, fields), {"batch_size": 2, **batch}, sizes)


def test_what_is_no_polynomial_along_an_axis_says_so_and_is_recorded() -> None:
    """A target padded to a power of two has no formulas; its account is recorded all the same."""

    def padded(model: nn.Module, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        more = (1 << (target.shape[1] - 1).bit_length()) - target.shape[1]
        return Seq2Seq.forward(model, source, nn.functional.pad(target, (0, more)))  # type: ignore[arg-type]

    class Padded(Seq2Seq):
        forward = padded  # type: ignore[assignment]

    batch = preflop.sized_batch(sentences, batch=2, source=5, target=3)
    with pytest.raises(BadSubject, match="has no formulas in its sizes"):
        formulas(Padded, batch)
    with pytest.raises(NotPolynomial):
        choices(Padded, batch, recompute="none")
    assert preflop.account(Padded, batch).memory.peak_bytes > 0


def test_choices_of_your_own_model() -> None:
    """evaluate(batch, source=, target=) == the account of the recorded step; `what_if` splits its batch."""
    batch = preflop.sized_batch(sentences, batch=4, source=5, target=3)
    ready = choices(Seq2Seq, batch, recompute="none")
    asked = preflop.sized_batch(sentences, batch=6, source=192, target=64)
    wanted = outcome_of(preflop.account(Seq2Seq, asked))
    found = ready.evaluate(6, source=192, target=64)
    for name in ("peak_bytes", "flops_model", "flops_total", "read_bytes", "write_bytes", "samples"):
        assert getattr(found, name) == getattr(wanted, name)
    with pytest.raises(NotPolynomial, match="batch 6, sequence 77"):
        ready.evaluate(6, 77)
    rows = preflop.what_if(Seq2Seq, batch, devices=()).rows
    assert next(row for row in rows if row.knob == "batch").words == "batch 2, 2 microbatches"


def test_formulas_have_the_names_of_the_axes() -> None:
    """Cross attention is 2 * B * source * target * 16 FLOPs, and every formula has the account's value."""
    batch = preflop.sized_batch(sentences, batch=6, source=192, target=64)
    found = formulas(Seq2Seq, batch)
    assert found.letters.keys() == {"source", "target"}
    product = next(row for row in found.rows if row.op == "aten.bmm" and row.phase == "forward")
    assert set((product.flops or "").split("*")) == {"2", "B", "source", "target", "16"}
    add_up(found, {"B": 6, "source": 192, "target": 64}, batch)


def test_formulas_are_refused_where_kernels_pad() -> None:
    """What oneDNN keeps is padded to 64: at 77 and 33 there is no formula, and the message says where there is."""
    with pytest.raises(BadSubject, match=r"a multiple of 64.*not at batch 6, source 77, target 33"):
        formulas(Seq2Seq, preflop.sized_batch(sentences, batch=6, source=77, target=33))


def add_up(found: Formulas, values: dict[str, int], batch: Any) -> None:
    """Each formula's value is its row's, and the rows' sum the account's."""
    for row in found.rows:
        if row.flops is not None:
            assert re.fullmatch(r"[\w*+^/ -]+", row.flops)
            assert eval(row.flops.replace("^", "**"), dict(values)) * row.calls == row.flops_at
    total = preflop.account(Seq2Seq, batch).flops.total
    assert sum(row.flops_at for row in found.rows) == total


def test_the_longest_source_fits_and_one_more_does_not() -> None:
    """`fit` along one axis with the others held: exactly as `account` says."""
    fixed = {"batch": 64, "source": 8, "target": 300}
    (answer,) = fit_model(Seq2Seq, device="l4", batch_from=sentences, what=(What.SOURCE,), **fixed)
    found = answer.found
    assert found.fits is not None
    assert found.one_more is not None
    assert found.one_more.size == found.fits.size + 1
    for need, fits in ((found.fits, True), (found.one_more, False)):
        batch = preflop.sized_batch(sentences, **{**fixed, "source": need.size})
        assert preflop.account(Seq2Seq, batch, device="l4").memory.fits is fits


def test_terms_and_values_go_together() -> None:
    """A term's name, evaluated, is its value."""
    axes = Axis("source"), Axis("target")
    names, values = basis_names(axes), basis(3, 5, 7)
    at = {"B": 3, "source": 5, "target": 7}
    assert [eval(name.replace("^", "**"), dict(at)) for name in names] == list(values)
    assert len(set(names)) == 12


REFUSED = {
    "longer than the table": (BART, ["--source-seq", "1025", "--target-seq", "8"], ["1024 positions", "--source-seq"]),
    "one is missing": (BART, ["--source-seq", "8"], ["needs a length for target", "--target-seq"]),
    "no such axis": (BART, ["--seq", "8", "--frames", "9"], ["has no frames", "--source-seq"]),
    "other frames": (WHISPER, ["--target-seq", "8", "--frames", "99"], ["reads 100 frames", "--frames"]),
    "too long to write": (WHISPER, ["--target-seq", "449"], ["448 positions"]),
    "too short a sound": (WAV2VEC2, ["--frames", "399", "--target-seq", "2"], ["needs 400", "--frames"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_sizes_that_a_model_cannot_run(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One clear message, status 2."""
    fields, words, said = REFUSED[case]
    assert run(["account", configured(tmp_path, fields), "--batch", "2", *words]) == 2
    error = capsys.readouterr().err
    assert all(part in error for part in said), error


def test_a_sequence_length_is_both(tmp_path: Path) -> None:
    """--seq 8 is --source-seq 8 --target-seq 8; a target of its own is taken."""
    model = configured(tmp_path, BART)
    account = partial(preflop.account, model)
    both = account({"batch_size": 2, "sequence_length": 8})
    apart = account({"batch_size": 2, "source_length": 8, "target_length": 8})
    assert both.tape.subject == apart.tape.subject
    assert lengths_of((Axis("source"), Axis("target")), {"seq": 64, "target": 8}, "it") == (64, 8)


def test_a_batch_function_takes_its_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--batch-from with parameters: made at the sizes of the command line; without sizes, or axes, refused."""
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def model(): return nn.Linear(48, 80)\n"
        "def rows(batch, seq): return torch.zeros(batch, seq, 48)\n"
    )
    model, rows = f"{tmp_path}/mine.py:model", f"{tmp_path}/mine.py:rows"
    assert run(["account", model, "--batch-from", rows, "--batch", "3", "--seq", "5", "--formulas", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["subject"]["batch"] == "3 x 5 tokens"
    assert any(row["flops"] == "2*B*S*80*48" for row in found["formulas"]["operators"])
    for words, said in ((["--batch", "3"], "needs a length for seq"), ([], "give --batch N")):
        assert run(["account", model, "--batch-from", rows, *words]) == 2
        assert said in capsys.readouterr().err
    assert takes_sizes(sentences)
