"""Random states of Python, NumPy, torch and CUDA: seeded, captured, restored.

torch's generator is seeded anew for each microbatch from (seed, step, microbatch), so that dropout is
the same whichever process runs the microbatch. The states are saved and restored all the same, for
whatever else draws from them.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from preflop.trainer.order import mixed


def seed_all(seed: int, rank: int) -> None:
    """Seed every generator of this process."""
    own = mixed(seed, rank)
    random.seed(own)
    np.random.seed(own & 0xFFFFFFFF)  # noqa: NPY002 - the global state is what other code draws from
    torch.manual_seed(own >> 1)


def seed_microbatch(seed: int, step: int, microbatch: int) -> None:
    """Seed torch for one microbatch, on the CPU and every CUDA device.

    `torch.manual_seed` does the same and, for every kind of device that is absent, formats a stack trace to
    keep until it is there (torch.cuda._lazy_call): half a millisecond each time.
    """
    own = mixed(seed, step, microbatch) >> 1
    torch.default_generator.manual_seed(own)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(own)


def capture() -> dict[str, Any]:
    """Every random state of this process, as JSON holds it."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    return {
        "python": [version, list(words), gauss],
        "numpy": [str(name), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": _hex(torch.get_rng_state()),
        "cuda": [_hex(state) for state in torch.cuda.get_rng_state_all()]
        if torch.cuda.is_available()
        else [],
    }


def restore(states: dict[str, Any]) -> list[str]:
    """Set every random state that this machine has a generator for.

    Returns:
        What could not be restored, in words.
    """
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(_tensor(states["torch"]))
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index, state in enumerate(states["cuda"][:devices]):
        torch.cuda.set_rng_state(_tensor(state), index)
    return [
        f"the random state of cuda:{index} was saved, and this machine has {devices or 'no'} CUDA devices"
        for index in range(devices, len(states["cuda"]))
    ]


def _hex(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
