"""A process group of any size in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist


@pytest.fixture
def ranks() -> Iterator[Any]:
    """Starts a group of so many ranks, of which this process is rank 0; its collectives return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def start(count: int) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)

    yield start
    dist.destroy_process_group()
