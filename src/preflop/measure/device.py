"""Where real work runs: the device that a command was asked for, if this machine has it."""

from __future__ import annotations

import torch

from preflop.errors import BadSubject


def real_device(name: str | None = None) -> torch.device:
    """The device of real tensors.

    Args:
        name: "cpu" or "cuda"; None: the GPU where torch sees one, else the CPU.

    Raises:
        BadSubject: CUDA where torch sees no GPU, or neither of the two.

    >>> real_device("cpu")
    device(type='cpu')
    """
    if name not in (None, "cpu", "cuda"):
        raise BadSubject(f"the device is {name!r}.\n  Give cpu or cuda, or leave it out.")
    seen = torch.cuda.is_available()
    if name == "cuda" and not seen:
        raise BadSubject(
            f"the device is cuda, and torch sees no CUDA GPU here: {_why_none()}.\n"
            "  Leave --device out or give --device cpu; or have a GPU, its driver and a CUDA build of torch."
        )
    return torch.device("cuda" if seen and name != "cpu" else "cpu")


def _why_none() -> str:
    """What torch knows of itself: without a driver or a GPU a CUDA build sees none either."""
    runtime = torch.version.cuda or getattr(torch.version, "hip", None)
    if runtime is None:
        return f"torch {torch.__version__} is built without CUDA"
    return f"torch {torch.__version__} is built for CUDA, and finds no driver or no GPU"
