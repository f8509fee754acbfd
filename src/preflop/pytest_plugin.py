"""pytest fixture `no_copies`: the test fails where a view becomes a copy. Loaded by pytest itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def no_copies() -> Iterator[None]:
    """Forbids hidden copies for the whole test (see `preflop.no_copies`)."""
    import preflop

    with preflop.no_copies():
        yield
