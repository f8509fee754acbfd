"""What matmuls reach by rows, inner size and columns, as `preflop calibrate` measured a grid of them.

Two products of equal FLOPs and bytes may take very different times: of (128, 1024) x (1024, 512) and
(1024, 128) x (128, 512) the second has eight times the results to share among threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING

from preflop.timing.surface import Surface
from preflop.timing.tiles import Result

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Products:
    """Share of the peak over (rows, inner size, columns): linear in the logarithms between the grid's eight
    neighbours, constant beyond its ends. The time in memory of a call is in it."""

    axes: tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]
    """Rows, inner sizes, columns: rising."""
    shares: tuple[float, ...]
    """Of every combination, columns fastest."""
    otherwise: Surface
    """For calls whose result is not known, or is a batch of products: by FLOPs and bytes."""

    @property
    def basis(self) -> str:
        """In words, what the shares stand on."""
        return self.otherwise.basis

    def at(self, flops: float, moved: float, result: Result | None) -> float:
        """The share of one call.

        >>> grid = Products(((32, 128), (32, 128), (32, 128)), (0.2,) * 7 + (0.8,), Surface((1.0,), (1.0,), (0.5,), ""))
        >>> round(grid.at(2 * 128**3, 1, (1, 128, 128)), 6), round(grid.at(2 * 32**3, 1, None), 6)
        (0.8, 0.5)
        """
        import numpy as np

        results = np.array([result or (0, 0, 0)], np.float64)
        return float(self.at_each(np.array([flops]), np.array([moved]), results)[0])

    def at_each(self, flops: np.ndarray, moved: np.ndarray, results: np.ndarray | None) -> np.ndarray:
        """The shares of many calls; results are (products, rows, columns), zeros where there is none."""
        import numpy as np

        shares = self.otherwise.at_each(flops, moved)
        if results is None:
            return shares
        single = (results[:, 0] == 1) & (flops > 0)
        if single.any():
            rows, columns = results[single, 1], results[single, 2]
            inner = flops[single] / (2 * rows * columns)
            shares[single] = self._between(np.stack([rows, inner, columns], axis=-1))
        return shares

    def _between(self, sizes: np.ndarray) -> np.ndarray:
        """Eight neighbours in logarithms, each weighted by how near it is along every axis."""
        import numpy as np

        low, part = [], []
        for axis, asked in zip(self._logs, np.log2(sizes).T):
            left = np.clip(np.searchsorted(axis, asked, side="right") - 1, 0, max(len(axis) - 2, 0))
            right = np.minimum(left + 1, len(axis) - 1)
            width = np.where(right > left, axis[right] - axis[left], 1.0)
            low.append((left, right))
            part.append(np.clip((asked - axis[left]) / width, 0.0, 1.0))
        found = np.zeros(len(sizes))
        for corner in product((0, 1), repeat=3):
            at = tuple(pair[side] for pair, side in zip(low, corner))
            weight = np.ones(len(sizes))
            for side, share in zip(corner, part):
                weight *= share if side else 1.0 - share
            found += weight * self._table[at]
        return np.asarray(np.exp2(found))

    @cached_property
    def _logs(self) -> list[np.ndarray]:
        import numpy as np

        return [np.log2(np.array(axis, np.float64)) for axis in self.axes]

    @cached_property
    def _table(self) -> np.ndarray:
        import numpy as np

        return np.asarray(np.log2(np.array(self.shares)).reshape([len(axis) for axis in self.axes]))


def products_from(points: Sequence[Sequence[float]], otherwise: Surface) -> Products | None:
    """A grid from [rows, inner, columns, share] points; None where one of its corners is missing."""
    found = {(p[0], p[1], p[2]): p[3] for p in points}
    rows, inner, columns = (tuple(sorted({size[at] for size in found})) for at in range(3))
    every = list(product(rows, inner, columns))
    if not every or any(size not in found or not math.isfinite(found[size]) for size in every):
        return None
    return Products((rows, inner, columns), tuple(found[size] for size in every), otherwise)
