"""`preflop time`, `fit` (without a model) and `dtypes`, through the command's own entry point."""

from __future__ import annotations

import json
from typing import Any

import pytest

from preflop.cli.main import run

TIME = "time --params 70e9 --tokens 15e12 --gpus 1024 --device h100-sxm --mfu 0.5"


def answer(capsys: pytest.CaptureFixture[str], line: str) -> Any:
    """The JSON that a command prints."""
    assert run([*line.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys: pytest.CaptureFixture[str], words: list[str]) -> str:
    """The message of a command that exits with status 2 and prints nothing on standard output."""
    assert run(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    return printed.err


def test_time_of_70b(capsys: pytest.CaptureFixture[str]) -> None:
    """70e9 parameters, 15e12 tokens, 1024 H100, MFU 0.5: 143.9 days, by a dense bf16 peak."""
    found = answer(capsys, TIME)
    assert round(found["days"], 1) == 143.9
    assert found["flops"] == 6 * 70 * 10**9 * 15 * 10**12
    assert (found["dtype"], found["peak_kind"]) == ("bfloat16", "dense")
    assert found["gpu_hours"] == pytest.approx(found["days"] * 24 * 1024)
    assert found["peak_source"]


def test_time_with_suffixes_is_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """70B and 15T are 70e9 and 15e12."""
    with_suffixes = answer(capsys, TIME.replace("70e9", "70B").replace("15e12", "15t"))
    assert with_suffixes == answer(capsys, TIME)


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("bf16-mixed", "bfloat16"), ("tf32", "tf32"), ("fp32", "float32"), ("fp8", "float8")],
)
def test_time_uses_the_peak_of_the_precision(
    capsys: pytest.CaptureFixture[str], precision: str, dtype: str
) -> None:
    """--precision takes a precision or a dtype, and the peak is that of the format matmuls run in."""
    assert answer(capsys, f"{TIME} --dtype {precision}")["dtype"] == dtype


def test_time_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    """The first line is the answer; the peak is said to be dense."""
    assert run(TIME.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("143.9 days")
    assert any("dense bf16" in line for line in lines)


@pytest.mark.parametrize("option", ["--params", "--tokens", "--gpus", "--mfu"])
@pytest.mark.parametrize("bad", ["nan", "inf", "-1", "0", "many", "1e999"])
def test_time_refuses_bad_numbers(capsys: pytest.CaptureFixture[str], option: str, bad: str) -> None:
    """NaN, infinite, negative, zero and non-numbers: status 2, naming the option and what it got."""
    message = refusal(capsys, [*TIME.split(), f"{option}={bad}"])
    assert f"{option} is {bad!r}" in message


def test_time_names_the_nearest_device_and_precision(capsys: pytest.CaptureFixture[str]) -> None:
    """Misspelt names: status 2 with the nearest ones; a dtype the device lacks is no default."""
    assert "Nearest" in refusal(capsys, TIME.replace("h100-sxm", "h100-smx").split())
    assert "Nearest: bf16" in refusal(capsys, [*TIME.split(), "--precision", "bf17"])
    assert "v100" in refusal(capsys, [*TIME.replace("h100-sxm", "v100").split(), "--dtype", "fp8"])


@pytest.mark.parametrize(("precision", "parameters"), [("fp32", 40e9), ("bf16-fp32-states", 53.3e9)])
def test_fit_napkin(capsys: pytest.CaptureFixture[str], precision: str, parameters: float) -> None:
    """Eight H100 with AdamW hold 40e9 parameters in fp32 and 53.3e9 with fp32 states over bf16."""
    found = answer(capsys, f"fit --device h100-sxm --gpus 8 --optimizer adamw --precision {precision}")
    assert round(found["parameters"] / 1e9, 1) == parameters / 1e9
    total = found["bytes_per_parameter"].pop("total")
    assert sum(found["bytes_per_parameter"].values()) == total


def test_fit_says_what_it_assumes(capsys: pytest.CaptureFixture[str]) -> None:
    """No activations, and an even split over the GPUs, are said."""
    assert run("fit --device h100-sxm --gpus 8".split()) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("40B parameters at most")
    assert "no activations" in printed and "split evenly" in printed


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--device h100-smx", "no device named"),
        ("--device h100-sxm --gpus 0", "--gpus is '0'"),
        ("--device h100-sxm --optimizer adamv", "no optimizer named"),
        ("--device h100-sxm --precision bf17", "no precision named"),
        ("--device h100-sxm --seq 1024", "--seq 1024 needs a model"),
        ("--device h100-sxm --recompute block", "--recompute block needs a model"),
        ("", "--device"),
    ],
)
def test_fit_refuses(capsys: pytest.CaptureFixture[str], words: str, expected: str) -> None:
    """Unknown names and bad numbers: status 2, one message."""
    assert expected in refusal(capsys, ["fit", *words.split()])


def test_dtypes_lists_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    """The formats of training, each with bytes, bits, range and epsilon."""
    formats = {f["name"]: f for f in answer(capsys, "dtypes")["formats"]}
    assert {"fp64", "fp32", "tf32", "bf16", "fp16", "fp8-e4m3fn", "fp8-e5m2", "fp4-e2m1fn", "int8"} <= set(
        formats
    )
    assert formats["fp16"]["smallest_subnormal"] == 2**-24


def test_dtypes_of_1e_minus_8(capsys: pytest.CaptureFixture[str]) -> None:
    """1e-8: 0 in fp16, not in bf16."""
    found = {r["format"]: r for r in answer(capsys, "dtypes 1e-8")["roundings"]}
    assert (found["fp16"]["value"], found["fp16"]["effect"]) == (0, "underflow")
    assert found["bf16"]["effect"] == "rounded"


def test_dtypes_json_has_no_infinity(capsys: pytest.CaptureFixture[str]) -> None:
    """1e5 overflows fp16 to the text "inf": plain JSON has no infinity."""
    found = {r["format"]: r for r in answer(capsys, "dtypes 1e5")["roundings"]}
    assert (found["fp16"]["value"], found["fp16"]["effect"]) == ("inf", "overflow")


def test_dtypes_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    """The table says underflow and overflow in words, and is at most 100 columns wide."""
    assert run(["dtypes", "1e-8"]) == 0
    printed = capsys.readouterr().out
    assert "underflows to 0" in printed
    assert run(["dtypes"]) == 0
    assert max(map(len, (printed + capsys.readouterr().out).splitlines())) <= 100


@pytest.mark.parametrize("bad", ["nan", "x", "1e999"])
def test_dtypes_refuses(capsys: pytest.CaptureFixture[str], bad: str) -> None:
    """What is no finite number near any format: status 2."""
    assert "VALUE is" in refusal(capsys, ["dtypes", bad])


def test_dtypes_takes_a_negative_value_after_two_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    """`preflop dtypes --json -- -1e5` rounds -100000."""
    assert run(["dtypes", "--json", "--", "-1e5"]) == 0
    found = {r["format"]: r["value"] for r in json.loads(capsys.readouterr().out)["roundings"]}
    assert found["fp16"] == "-inf"


@pytest.mark.long
def test_fit_finds_the_largest_batch(capsys: pytest.CaptureFixture[str]) -> None:
    """gpt2-nano on an L4: a batch fits and the next one does not, both by `preflop.account`."""
    import preflop

    found = answer(capsys, "fit gpt2-nano --seq 64 --device l4 --what batch")["batch"]
    batch = found["largest"]
    assert found["one_more"]["size"] == batch + 1
    sizes = {"batch_size": batch, "sequence_length": 64}
    assert preflop.account("gpt2-nano", sizes, device="l4").memory.fits
    sizes["batch_size"] += 1
    assert not preflop.account("gpt2-nano", sizes, device="l4").memory.fits


def test_fit_answers_no_with_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    """Llama 2 7B in fp32 with AdamW is 108 GB before its first activation: no batch fits 80 GB."""
    assert run("fit llama-2-7b --seq 16 --device h100-sxm --what batch --json".split()) == 1
    found = json.loads(capsys.readouterr().out)["batch"]
    assert found["fits"] is None
    assert found["one_more"]["spare_bytes"] < 0
