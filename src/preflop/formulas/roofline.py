"""The roofline: what a device can reach at an arithmetic intensity."""

from __future__ import annotations

from preflop.quantity import require_positive


def arithmetic_intensity(flops: float, moved_bytes: float) -> float:
    """FLOPs done per byte moved.

    >>> arithmetic_intensity(2 * 1024**3, 3 * 2 * 1024**2)        # a square bf16 matmul of 1024
    341.3333333333333

    Source: Williams, Waterman, Patterson 2009 (CACM 52(4)), "operational intensity".

    Raises:
        BadNumber: either is zero, negative, NaN or infinite (nothing moved has no intensity).
    """
    require_positive(flops=flops, moved_bytes=moved_bytes)
    return flops / moved_bytes


def attainable_flops_per_s(
    peak_flops_per_s: float, bandwidth_bytes_per_s: float, intensity_flops_per_byte: float
) -> float:
    """The rate a device can reach: min(peak, bandwidth · intensity), in FLOP/s.

    >>> [attainable_flops_per_s(989.5e12, 3.35e12, intensity) / 1e12 for intensity in (1, 400)]
    [3.35, 989.5]

    Source: Williams, Waterman, Patterson 2009 (CACM 52(4)).

    Raises:
        BadNumber: any of them is zero, negative, NaN or infinite.
    """
    require_positive(
        peak_flops_per_s=peak_flops_per_s,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        intensity_flops_per_byte=intensity_flops_per_byte,
    )
    return min(peak_flops_per_s, bandwidth_bytes_per_s * intensity_flops_per_byte)


def ridge_point(peak_flops_per_s: float, bandwidth_bytes_per_s: float) -> float:
    """FLOPs per byte from which the peak, and no longer the bandwidth, is the bound: peak / bandwidth.

    >>> round(ridge_point(989.5e12, 3.35e12))        # H100 SXM in bf16
    295

    Source: Williams, Waterman, Patterson 2009 (CACM 52(4)).

    Raises:
        BadNumber: either is zero, negative, NaN or infinite.
    """
    require_positive(peak_flops_per_s=peak_flops_per_s, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
    return peak_flops_per_s / bandwidth_bytes_per_s


def lower_bound_s(
    flops: float, moved_bytes: float, peak_flops_per_s: float, bandwidth_bytes_per_s: float
) -> float:
    """Seconds that one operator cannot beat: max(FLOPs / peak, bytes / bandwidth).

    >>> lower_bound_s(989.5e12, 3.35e12, 989.5e12, 3.35e12)
    1.0

    Source: Williams, Waterman, Patterson 2009 (CACM 52(4)), as a time.

    Raises:
        BadNumber: a rate that is zero, negative, NaN or infinite.
    """
    require_positive(peak_flops_per_s=peak_flops_per_s, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
    return max(flops / peak_flops_per_s, moved_bytes / bandwidth_bytes_per_s)
