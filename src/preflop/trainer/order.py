"""Which sample comes when: a shuffle that is a function of seed and position, and keeps no state.

Position p of a run is sample `shuffled(p % count)` of epoch `p // count`. So the data position of a run
is one integer, whatever workers fetched ahead, and any number of processes agree on it. An epoch's order
is a permutation made by a Feistel network (a bijection whatever its round function is; Luby and Rackoff
1988) and takes no memory.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 6
_MASK = (1 << 64) - 1


def mixed(*numbers: int) -> int:
    """64 bits that depend on every number, for seeds: splitmix64 over them.

    >>> mixed(0, 1) != mixed(1, 0)
    True

    Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators".
    """
    state = 0
    for number in numbers:
        state = (state ^ (number & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


def sample_ids(positions: NDArray[np.int64], count: int, seed: int) -> NDArray[np.int64]:
    """The samples at these positions of the run: each of `count` once per epoch, every epoch reshuffled.

    >>> sorted(sample_ids(np.arange(5, 10), 5, seed=0).tolist())         # the second epoch
    [0, 1, 2, 3, 4]
    """
    ids = np.empty(len(positions), dtype=np.int64)
    epochs = positions // count
    for epoch in np.unique(epochs):
        here = epochs == epoch
        ids[here] = shuffled(positions[here] % count, count, mixed(seed, int(epoch)))
    return ids


def shuffled(indices: NDArray[np.int64], count: int, key: int) -> NDArray[np.int64]:
    """Where a shuffle of range(count) puts each index; one to one.

    Indices that leave the range are shuffled again until they are in it ("cycle walking"), which takes
    two turns on average at most, because the network's range is below twice `count`.
    """
    if count == 1:
        return np.zeros_like(indices)
    bits = (count - 1).bit_length()
    keys = [mixed(key, turn) for turn in range(_ROUNDS)]
    values = indices.astype(np.uint64)
    outside = np.ones(len(values), dtype=bool)
    while outside.any():
        values[outside] = _feistel(values[outside], bits, keys)
        outside = values >= count
    return values.astype(np.int64)


def _feistel(values: NDArray[np.uint64], bits: int, keys: list[int]) -> NDArray[np.uint64]:
    """A permutation of range(2 ** bits): halves change places, one mixed with a hash of the other."""
    left_bits, right_bits = bits - bits // 2, bits // 2
    left, right = values >> np.uint64(right_bits), values & np.uint64((1 << right_bits) - 1)
    for key in keys:
        mask = np.uint64((1 << left_bits) - 1)
        left, right = right, (left ^ _hashed(right, key)) & mask
        left_bits, right_bits = right_bits, left_bits
    return left << np.uint64(right_bits) | right


def _hashed(values: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    state = values + np.uint64(key)  # wraps, as meant
    state = (state ^ state >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ state >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return state ^ state >> np.uint64(31)
