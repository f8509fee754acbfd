"""Numbers as people type them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preflop.errors import BadNumber
from preflop.quantity import read_count, read_number, read_share


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("70e9", 70 * 10**9),
        ("70B", 70 * 10**9),
        ("7b", 7 * 10**9),
        ("70.6B", 70_600_000_000),
        ("15T", 15 * 10**12),
        ("124M", 124 * 10**6),
        ("32k", 32_000),
        ("1_000", 1000),
        (" 8 ", 8),
        ("1024", 1024),
        ("1.5e3", 1500),
        ("123456789012345678901", 123456789012345678901),
    ],
)
def test_counts(text: str, count: int) -> None:
    """Suffixes, exponents and decimals are read exactly, not through a float."""
    assert read_count(text, "--n") == count


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "nan",
        "NaN",
        "inf",
        "-inf",
        "Infinity",
        "0",
        "-0",
        "-1",
        "-70B",
        "B",
        "T",
        "seven",
        "1.5",
        "1e-3",
    ]
    + [
        "7BB",
        "7 B x",
        "0x10",
        "1e30",
        "1e999999",
        "1e999999999999999999",
        "1e-999999999999999999",
        "sNaN",
        "1,000",
    ],
)
def test_what_is_not_a_count_is_refused(text: str) -> None:
    """Not a number, not finite, not whole, below 1 or absurdly large: BadNumber, naming option and text."""
    with pytest.raises(BadNumber, match="--gpus is") as caught:
        read_count(text, "--gpus")
    assert repr(text) in str(caught.value)
    assert "Needed:" in str(caught.value)


@pytest.mark.parametrize("text", ["nan", "inf", "0", "-0.5", "1.01", "50", "half", "1e-999999"])
def test_what_is_not_a_share_is_refused(text: str) -> None:
    """A share lies above 0 and at most at 1."""
    with pytest.raises(BadNumber, match="--mfu is"):
        read_share(text, "--mfu")


def test_shares() -> None:
    """0.5 and 1 are shares."""
    assert (read_share("0.5", "--mfu"), read_share("1", "--mfu")) == (0.5, 1.0)


@given(st.integers(1, 10**24))
def test_every_count_reads_as_itself(count: int) -> None:
    """read(write(n)) == n."""
    assert read_count(str(count), "--n") == count


@given(st.text(max_size=12))
def test_no_text_breaks_the_reader(text: str) -> None:
    """Any text is a number or a BadNumber; nothing else escapes."""
    try:
        read_number(text, "--n")
        read_count(text, "--n")
    except BadNumber as error:
        assert "--n is" in str(error)
