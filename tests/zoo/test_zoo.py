"""Every member of the zoo: the peaks of a real step are the predicted ones.

A sample runs by default; `pytest -m "long or not long" tests/zoo` (or `-m long`) runs the rest.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from preflop.measure.verify import SLACK_BYTES, Verification, verify_subject
from preflop.subject import resolve
from tests.zoo.members import EXACT, MEMBERS, Member


def _verify(member: Member) -> Verification:
    if "hugging_face" in getattr(member.model, "__module__", ""):
        pytest.importorskip("transformers")
    if member.name == "lora-peft":
        pytest.importorskip("peft")
    return verify_subject(
        resolve(member.model, member.batch, **member.keywords()), tolerance=member.tolerance
    )


@pytest.mark.parametrize(
    "member",
    [
        pytest.param(member, id=member.name, marks=() if member.sample else (pytest.mark.long,))
        for member in MEMBERS
    ],
)
def test_member_verifies(member: Member) -> None:
    """Steady and first step's peak are within 0.1 % (0.5 % with oneDNN's convolutions) of a real
    step's, and FLOPs equal FlopCounterMode's wherever that is right."""
    found = _verify(member)
    for peak in (found.steady, found.first):
        apart = abs(peak.predicted_bytes - peak.measured_bytes)
        assert apart <= max(member.tolerance * peak.measured_bytes, SLACK_BYTES), peak
    assert found.flops.agrees is not False, found.flops


def test_the_zoo_is_wide() -> None:
    """At least 24 members, each name once; only members with convolutions get the wider tolerance."""
    assert len(MEMBERS) >= 24
    assert len({member.name for member in MEMBERS}) == len(MEMBERS)
    assert sum(member.tolerance == EXACT for member in MEMBERS) >= 24
    assert 10 <= sum(member.sample for member in MEMBERS) <= 24
