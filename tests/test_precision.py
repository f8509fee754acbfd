"""Precisions: bytes per parameter as the specification states them."""

import pytest

from preflop.errors import UnknownPrecision
from preflop.precision import PRECISIONS, find_precision

# design.md, Contract: bytes per parameter with AdamW.
WITH_ADAMW = {
    "fp32": 16,
    "tf32": 16,
    "bf16-mixed": 16,
    "fp16-mixed": 16,
    "bf16": 8,
    "bf16-fp32-states": 12,
    "bf16-master": 16,
}
# Beside the contract's: fp8 products over what bf16-mixed keeps.
MORE = {"fp8": 16}


@pytest.mark.parametrize(("name", "expected"), [*WITH_ADAMW.items(), *MORE.items()])
def test_bytes_per_parameter_with_adamw(name: str, expected: int) -> None:
    """Weights + gradients + two states: 16 in fp32, 12 with fp32 states over bf16, 8 all in bf16."""
    assert find_precision(name).bytes_per_parameter(2) == expected


def test_every_precision_of_the_contract_exists() -> None:
    """The table has the contract's seven names, and fp8."""
    assert set(PRECISIONS) == {*WITH_ADAMW, *MORE}


def test_master_copy_counts_as_state() -> None:
    """bf16-master with SGD: 2 + 2 + the 4 bytes of the copy."""
    assert find_precision("bf16-master").bytes_per_parameter(0) == 8


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp32", "float32"), ("tf32", "tf32"), ("fp16-mixed", "float16"), ("bf16-master", "bfloat16"), ("fp8", "float8")],
)
def test_compute_dtype(name: str, dtype: str) -> None:
    """Matmuls run in autocast's dtype where there is one, in TF32 where asked, else in the weights'."""
    assert find_precision(name).compute_dtype == dtype


def test_unknown_names_the_nearest() -> None:
    """A misspelt precision is an error that says what was got, the nearest, and all of them."""
    with pytest.raises(UnknownPrecision, match=r"(?s)'bf16-mix'.*Nearest: bf16-mixed.*All: .*fp32"):
        find_precision("bf16-mix")
