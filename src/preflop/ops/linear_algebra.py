"""Solvers and factorizations: leading terms of LAPACK's own operation counts.

They are no matmul-like work: FlopCounterMode counts none of them, and they do not enter MFU.
Source: LAPACK Working Note 41 (Installation Guide), appendix C, "Operation Counts for the BLAS and LAPACK".
"""

from __future__ import annotations

from preflop.ops.arguments import keyword, multiply_add_flops, need, product
from preflop.ops.registry import Kind, Work, flops
from preflop.tape.events import Signature, TensorMeta


def _square(meta: TensorMeta) -> tuple[int, int]:
    """(matrices in the batch, rows of each) of a stack of square matrices."""
    return product(meta.shape[:-2]), meta.shape[-1]


def _work(meta: TensorMeta, count: int, *, estimate: bool = False) -> Work:
    """`count` real operations, four times as many in complex numbers."""
    return Work(count * multiply_add_flops(meta) // 2, Kind.OTHER, estimate=estimate)


@flops("aten.linalg_solve_triangular", "aten.triangular_solve")
def triangular(sig: Signature) -> Work:
    """FLOPs of solving with an n x n triangle for k right-hand sides: n²·k, exact (xTRSM).

    A triangle with ones on its diagonal needs no division: n·(n − 1)·k.
    """
    first, second = need(sig, 0, "self"), need(sig, 1, "B")
    triangle, given = (second, first) if sig.op.endswith(".triangular_solve") else (first, second)
    n = triangle.shape[-1]
    rows = n - 1 if keyword(sig, "unitriangular", False) else n
    batch = product(sig.outputs[0].shape[:-2])
    columns = product(given.shape[-2:]) // max(n, 1)
    return _work(triangle, batch * n * rows * columns)


@flops("aten.linalg_cholesky_ex", "aten.cholesky")
def cholesky(sig: Signature) -> Work:
    """FLOPs of A = L·Lᵀ: n³/3 + n²/2 + n/6 (xPOTRF), an integer."""
    meta = need(sig, 0, "self")
    batch, n = _square(meta)
    return _work(meta, batch * ((2 * n**3 + 3 * n**2 + n) // 6))


@flops("aten.linalg_lu_factor_ex", "aten._linalg_det", "aten._linalg_slogdet")
def lu(sig: Signature) -> Work:
    """FLOPs of A = P·L·U for n x n: 2·n³/3 (xGETRF, leading term)."""
    meta = need(sig, 0, "A")
    batch, n = _square(meta)
    return _work(meta, batch * 2 * n**3 // 3, estimate=True)


@flops("aten.linalg_inv_ex")
def inverse(sig: Signature) -> Work:
    """FLOPs of an inverse: 2·n³ (xGETRF and xGETRI, leading terms)."""
    meta = need(sig, 0, "A")
    batch, n = _square(meta)
    return _work(meta, batch * 2 * n**3, estimate=True)


@flops("aten._linalg_solve_ex")
def solve(sig: Signature) -> Work:
    """FLOPs of A⁻¹·B for k right-hand sides: 2·n³/3 + 2·n²·k (xGETRF and xGETRS, leading terms)."""
    meta, given = need(sig, 0, "A"), need(sig, 1, "B")
    batch, n = _square(meta)
    columns = product(given.shape) // max(batch * n, 1)
    return _work(meta, batch * (2 * n**3 // 3 + 2 * n**2 * columns), estimate=True)


@flops("aten.linalg_lu_solve")
def lu_solve(sig: Signature) -> Work:
    """FLOPs of a solve from known factors: 2·n²·k (xGETRS, leading term)."""
    meta, given = need(sig, 0, "LU"), need(sig, 2, "B")
    n = meta.shape[-1]
    return _work(meta, 2 * n * product(given.shape), estimate=True)


TAYLOR_PRODUCTS = 5
"""Matrix products of the polynomial of degree 18, the highest. Source: aten/src/ATen/native/LinearAlgebra.cpp,
`compute_T18`."""


@flops("aten.linalg_matrix_exp")
def matrix_exponential(sig: Signature) -> Work:
    """FLOPs of exp(A) for n x n by the polynomial of degree 18: 10·n³.

    A batch always takes that degree; one matrix a lower one (0 to 4 products) where its norm is at most 1.461
    in fp32. Squarings, 2·n³ each, are not counted: ceil(log2(norm / 3.01)) of them in fp32.
    """
    meta = need(sig, 0, "self")
    batch, n = _square(meta)
    return _work(meta, batch * TAYLOR_PRODUCTS * 2 * n**3, estimate=True)
