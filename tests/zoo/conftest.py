"""What the zoo's tests share: a fixed number of threads, which some kernels' scratch depends on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

THREADS = 2


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """Two threads, on any machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)
