"""How much of a matmul's tiles and waves is work: large matrix units compute in whole tiles, all units in whole waves.

A result of M x N is cut into tiles, one for each multiprocessor at a time. What of the last row, column and wave of
tiles is empty takes as long as what is full. Source: NVIDIA, Matrix Multiplication Background User's Guide
(DU-09799-001), sections 2.3, 3.1 and 3.2.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

# cuBLAS's typical tiles, most efficient first (section 2.3). A larger one loads less per FLOP; a smaller one is taken
# where the larger would leave units without any tile.
TILES = (((256, 128), (128, 256)), ((128, 128),), ((256, 64), (64, 256)), ((128, 64), (64, 128)), ((64, 64),))
_RESULT = re.compile(r"-> \((\d+(?:, \d+)*)\)$")

Result = tuple[int, int, int]
"""Products, rows and columns of what a call writes."""


def result_of(shapes: str) -> Result | None:
    """The result of a matmul, from the text of a row's shapes; None where that is no matrix.

    >>> result_of("(8, 16) x (16, 32) -> (8, 32)"), result_of("(4, 8, 16) x (4, 16, 2) -> (4, 8, 2)")
    ((1, 8, 32), (4, 8, 2))
    """
    sizes = result_sizes(shapes)
    if sizes is None:
        return None
    products, rows, columns = sizes if len(sizes) == 3 else (1, *sizes)
    return products, rows, columns


def result_sizes(shapes: str) -> tuple[int, ...] | None:
    """The two or three sizes of a row's result as written: numbers, or symbols of a tape without sizes.

    >>> result_sizes("(8, 16) x (16, 32) -> (8, 32)"), result_sizes("(8) -> (8)")
    ((8, 32), None)
    """
    found = _RESULT.search(shapes)
    sizes = tuple(int(size) for size in found[1].split(", ")) if found else ()
    return sizes if len(sizes) in (2, 3) else None


def tile_share(result: Result, units: int) -> float:
    """Share of the tiles' arithmetic that is wanted, by the largest tile of which every unit gets one.

    Args:
        units: multiprocessors of the device.

    >>> round(tile_share((1, 8192, 8192), 132), 3)     # 2048 tiles: 15.5 waves take as long as 16
    0.97
    >>> round(tile_share((1, 256 * 133, 128), 132), 3)     # one tile too many
    0.504
    """
    products, rows, columns = result
    best = 0.0
    for alike in TILES:
        enough = False
        best = 0.0
        for height, width in alike:
            tiles = products * -(-rows // height) * -(-columns // width)
            waves = -(-tiles // units)
            enough = enough or tiles >= units
            best = max(best, products * rows * columns / (waves * units * height * width))
        if enough:
            return best
    return best


def tile_shares(results: np.ndarray, units: int) -> np.ndarray:
    """`tile_share` of many results, one a row; rows of zeros, which are no matmuls, get 1."""
    import numpy as np

    products, rows, columns = results.astype(np.float64).T
    wanted = products * rows * columns
    share = np.zeros(len(results))
    open_ = np.ones(len(results), bool)
    for alike in TILES:
        best = np.zeros(len(results))
        enough = np.zeros(len(results), bool)
        for height, width in alike:
            tiles = products * np.ceil(rows / height) * np.ceil(columns / width)
            waves = np.maximum(np.ceil(tiles / units), 1)
            enough |= tiles >= units
            best = np.maximum(best, wanted / (waves * units * height * width))
        share = np.where(open_, best, share)
        open_ &= ~enough
    return np.where(wanted > 0, share, 1.0)
