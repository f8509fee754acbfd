"""Model states per device under ZeRO, after Rajbhandari et al. 2020 (arXiv 1910.02054).

Mixed-precision Adam: 2 bytes of weights, 2 of gradients, K = 12 of optimizer states (fp32 copy and two
states) per parameter. Analytic, as printed: does not count activations, buffers or padding. GB is 1e9.
"""

from __future__ import annotations

from preflop.quantity import require_positive

# Bytes per parameter of fp16 weights, fp16 gradients, and Adam's fp32 copy, momentum and variance.
WEIGHT_BYTES, GRADIENT_BYTES, STATE_BYTES = 2, 2, 12


def zero_0_bytes(parameters: int) -> float:
    """Bytes per device when every device keeps everything: (2 + 2 + K)·Ψ.

    >>> zero_0_bytes(7_500_000_000) / 1e9
    120.0

    Source: section 3.1, figure 1.
    """
    require_positive(parameters=parameters)
    return float((WEIGHT_BYTES + GRADIENT_BYTES + STATE_BYTES) * parameters)


def zero_1_bytes(parameters: int, devices: int) -> float:
    """Bytes per device with optimizer states split: (2 + 2 + K/N)·Ψ.

    >>> round(zero_1_bytes(7_500_000_000, 64) / 1e9, 1)
    31.4

    Source: section 5.1, figure 1.
    """
    require_positive(parameters=parameters, devices=devices)
    return (WEIGHT_BYTES + GRADIENT_BYTES + STATE_BYTES / devices) * parameters


def zero_2_bytes(parameters: int, devices: int) -> float:
    """Bytes per device with states and gradients split: (2 + (2 + K)/N)·Ψ.

    >>> round(zero_2_bytes(7_500_000_000, 64) / 1e9, 1)
    16.6

    Source: section 5.2, figure 1.
    """
    require_positive(parameters=parameters, devices=devices)
    return (WEIGHT_BYTES + (GRADIENT_BYTES + STATE_BYTES) / devices) * parameters


def zero_3_bytes(parameters: int, devices: int) -> float:
    """Bytes per device with states, gradients and weights split: (2 + 2 + K)/N·Ψ.

    >>> round(zero_3_bytes(7_500_000_000, 64) / 1e9, 1)
    1.9

    Source: section 5.3, figure 1.
    """
    require_positive(parameters=parameters, devices=devices)
    return (WEIGHT_BYTES + GRADIENT_BYTES + STATE_BYTES) / devices * parameters
