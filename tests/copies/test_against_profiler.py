"""The copies ledger is what torch's profiler shows as copy kernels: none missed, none invented."""

from __future__ import annotations

import pytest

from tests.copies.models import CASES
from tests.copies.truth import of_profiler, of_tape


@pytest.mark.parametrize("name", CASES)
def test_copy_kernels_of_a_training_step(name):
    """Every aten::copy_ of the real second step is in the ledger with its bytes, and nothing else is."""
    pytest.importorskip("transformers")
    real, told = of_profiler(CASES[name]), of_tape(CASES[name])
    assert (real - told, told - real) == ({}, {}), "missed, invented"
