"""What one measured operator reaches, by FLOPs and by FLOPs per byte: `preflop calibrate` measures both ways."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

_NEAREST = 4
"""Measured calls that a call is interpolated from."""


@dataclass(frozen=True)
class Surface:
    """Share of the peak over (FLOPs, bytes moved) of one call, between measured calls.

    A matmul of few rows moves more bytes for its FLOPs than a square one and is slower; by FLOPs alone the two
    would be one. Interpolated in the logarithms of FLOPs and FLOPs per byte, the nearest four measured calls
    weighted by the inverse square of their distance: a measured call gives itself. Source: D. Shepard, "A
    two-dimensional interpolation function for irregularly-spaced data", ACM 1968, doi 10.1145/800186.810616.
    """

    flops: tuple[float, ...]
    moved: tuple[float, ...]
    shares: tuple[float, ...]
    basis: str

    def at(self, flops: float, moved: float) -> float:
        """The share that a call of this size reaches; its time in memory is in it.

        >>> round(Surface((1e6, 1e9), (1e5, 1e7), (0.1, 0.8), "").at(1e9, 1e7), 6)
        0.8
        """
        import numpy as np

        return float(self.at_each(np.array([flops]), np.array([moved]))[0])

    def at_each(self, flops: np.ndarray, moved: np.ndarray) -> np.ndarray:
        """The shares of many calls."""
        import numpy as np

        here = np.stack([np.log2(np.maximum(flops, 1.0)), np.log2(_per_byte(flops, moved))], axis=-1)
        measured = np.array(
            [[math.log2(f), math.log2(f / m)] for f, m in zip(self.flops, self.moved)], np.float64
        )
        far = ((here[:, None, :] - measured[None, :, :]) ** 2).sum(axis=-1)
        near = np.argsort(far, axis=-1, kind="stable")[:, :_NEAREST]
        weights = 1.0 / (np.take_along_axis(far, near, axis=-1) + 1e-9)
        logs = np.log(np.array(self.shares))[near]
        shares: np.ndarray = np.exp((weights * logs).sum(axis=-1) / weights.sum(axis=-1))
        return shares


def _per_byte(flops: np.ndarray, moved: np.ndarray) -> np.ndarray:
    import numpy as np

    per_byte: np.ndarray = np.maximum(flops, 1.0) / np.maximum(moved, 1.0)
    return per_byte


def surface_from(points: Sequence[Sequence[float]], basis: str) -> Surface:
    """A surface from [FLOPs, bytes, share] points."""
    flops, moved, shares = (tuple(float(point[at]) for point in points) for at in range(3))
    return Surface(flops, moved, shares, basis)
