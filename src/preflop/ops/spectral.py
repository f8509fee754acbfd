"""Fast Fourier transforms: a labelled estimate, 5·n·log2(n) per complex and half of that per real one."""

from __future__ import annotations

from math import log2

from preflop.ops.arguments import argument, need, product
from preflop.ops.registry import Kind, Work, flops
from preflop.tape.events import Signature


def _transform_flops(shape: tuple[int, ...], dims: tuple[int, ...], real: bool) -> int:
    """FLOPs of transforming `shape` over `dims`: (5, real 2.5) · elements · log2(points).

    Source: FFTW's benchmark methodology (fftw.org/speed): 5 N log2 N, 2.5 N log2 N for real data.
    """
    points = product(tuple(shape[dim] for dim in dims))
    if points < 2:
        return 0
    return round((2.5 if real else 5.0) * product(shape) * log2(points))


@flops("aten._fft_r2c")
def real_to_complex(sig: Signature) -> Work:
    """FLOPs of a real transform, by the input's size (estimate)."""
    x = need(sig, 0, "self")
    return _estimate(_transform_flops(x.shape, argument(sig, 1, "dim", ()), real=True))


@flops("aten._fft_c2r")
def complex_to_real(sig: Signature) -> Work:
    """FLOPs of an inverse real transform, by the output's size (estimate)."""
    return _estimate(_transform_flops(sig.outputs[0].shape, argument(sig, 1, "dim", ()), real=True))


@flops("aten._fft_c2c")
def complex_to_complex(sig: Signature) -> Work:
    """FLOPs of a complex transform (estimate)."""
    x = need(sig, 0, "self")
    return _estimate(_transform_flops(x.shape, argument(sig, 1, "dim", ()), real=False))


def _estimate(count: int) -> Work:
    return Work(count, Kind.OTHER, estimate=True)
