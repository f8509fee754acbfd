"""Bytes of what a model keeps whatever its batch: weights, gradients, optimizer states."""

from __future__ import annotations

import math

from preflop.quantity import require_positive


def tensor_bytes(shape: tuple[int, ...], bytes_per_element: int) -> int:
    """Bytes of one tensor: elements x bytes per element.

    >>> tensor_bytes((12_288, 49_152), 4)        # one feed-forward matrix of GPT-3 in fp32, 2.25 GiB
    2415919104

    Source: Brown et al. 2020 (arXiv 2005.14165), table 2.1, for the example's sizes.
    """
    return math.prod(shape) * bytes_per_element


def model_state_bytes(parameters: int, bytes_per_parameter: int) -> int:
    """Bytes of weights, gradients and optimizer states together.

    >>> model_state_bytes(7_500_000_000, 16) / 1e9
    120.0

    Source: Rajbhandari et al. 2020 (arXiv 1910.02054), section 3.1: 2 + 2 + 12 = 16 bytes per
    parameter for mixed-precision Adam; 4 + 4 + 8 in fp32.
    """
    return parameters * bytes_per_parameter


def optimizer_state_bytes(parameters: int, states_per_parameter: int, bytes_per_state: int) -> int:
    """Bytes of the tensors an optimizer keeps per parameter: AdamW has two, SGD none.

    >>> optimizer_state_bytes(124_439_808, 2, 4)        # GPT-2, AdamW in fp32
    995518464

    Does not count step counters or a master copy. Source: Kingma, Ba 2015 (arXiv 1412.6980),
    algorithm 1, m and v.
    """
    return parameters * states_per_parameter * bytes_per_state


def largest_parameters(memory_bytes: int, bytes_per_parameter: int) -> int:
    """The most parameters whose weights, gradients and states fit: memory / bytes per parameter.

    >>> largest_parameters(8 * 80 * 10**9, 16), largest_parameters(8 * 80 * 10**9, 12)
    (40000000000, 53333333333)

    Does not count activations, temporaries, buffers or the context: an upper bound.
    Source: Rajbhandari et al. 2020 (arXiv 1910.02054), section 3.1, solved for the parameters.

    Raises:
        BadNumber: either is zero, negative, NaN or infinite.
    """
    require_positive(memory_bytes=memory_bytes, bytes_per_parameter=bytes_per_parameter)
    return memory_bytes // bytes_per_parameter
