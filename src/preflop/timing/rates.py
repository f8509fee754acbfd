"""What a kernel of a family is expected to reach on a device: shares of peak and bandwidth, with basis."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from preflop.hardware.device import Device
from preflop.timing.achieved import Achieved, achieved_bandwidth, achieved_matmul
from preflop.timing.kernels import (
    BACKWARD_PRODUCTS,
    Curve,
    Family,
    device_curve,
    device_surface,
    relative_to_elementwise,
    size_of,
)
from preflop.timing.products import Products
from preflop.timing.surface import Surface
from preflop.timing.this import is_this
from preflop.timing.tiles import Result, tile_share, tile_shares

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class KernelRate:
    """Shares of the dense peak and of the bandwidth as sold, as functions of one call's size."""

    kind: Family
    compute: Curve | Surface | Products | None
    """None: the kernel's arithmetic is not what is measured (element-wise); the share is 1. A surface, or a grid of
    products, is of whole calls, what they move included."""
    moving: Curve
    relative: float = 1.0
    """What `moving` is multiplied by: of softmax and norms measured on other devices."""
    cautions: tuple[str, ...] = ()
    units: int = 0
    """Multiprocessors, where matmuls are cut into tiles and waves (`tiles.py`): where no curve was measured."""

    @property
    def bases(self) -> Iterator[str]:
        """In words, what the shares stand on."""
        for curve in (self.compute, self.moving):
            if curve is not None:
                yield curve.basis
        yield from self.cautions

    def compute_share(self, flops: float, moved: float, result: Result | None = None) -> float:
        """Share of the dense peak, for FLOPs counted as the model needs them.

        Args:
            result: what a matmul writes; None: nothing is known of its tiles.
        """
        if self.compute is None:
            return 1.0
        if isinstance(self.compute, Surface):
            return self.compute.at(flops, moved)
        if isinstance(self.compute, Products):
            return self.compute.at(flops, moved, result)
        tiles = tile_share(result, self.units) if self.units and result else 1.0
        return self.compute.at(size_of(self.kind, flops, moved)) * tiles / self._products

    def moving_share(self, moved: float) -> float:
        """Share of the bandwidth as sold; without bound where `compute` has the bytes' time in it."""
        if isinstance(self.compute, (Surface, Products)):
            return math.inf
        return self.moving.at(moved) * self.relative

    def compute_shares(
        self, flops: np.ndarray, moved: np.ndarray, results: np.ndarray | None = None
    ) -> np.ndarray:
        """`compute_share` of many calls; `results` has one row for each, of zeros where there is no matmul."""
        import numpy as np

        if self.compute is None:
            return np.ones_like(flops)
        if isinstance(self.compute, Surface):
            return self.compute.at_each(flops, moved)
        if isinstance(self.compute, Products):
            return self.compute.at_each(flops, moved, results)
        if self.kind is Family.BATCHED or self.kind.attends:
            per_byte = np.divide(flops, moved, out=np.zeros_like(flops), where=moved > 0)
            sizes = per_byte * (2.0 if self.kind.attends else 1.0)
        else:
            sizes = flops
        tiles = tile_shares(results, self.units) if self.units and results is not None else 1.0
        return self.compute.at_each(sizes) * tiles / self._products

    def moving_shares(self, moved: np.ndarray) -> np.ndarray:
        """`moving_share` of many calls."""
        if isinstance(self.compute, (Surface, Products)):
            import numpy as np

            return np.full_like(moved, math.inf)
        return self.moving.at_each(moved) * self.relative

    @property
    def by_result(self) -> bool:
        """Whether a matmul's share depends on the sizes of what it writes."""
        return bool(self.units) or isinstance(self.compute, Products)

    @property
    def _products(self) -> float:
        backward = self.kind.attends and "backward" in self.kind.value
        return BACKWARD_PRODUCTS if backward else 1.0


@dataclass(frozen=True, slots=True)
class Named:
    """What tells one kernel from another of its family on this machine, calibrated, which measured them singly."""

    op: str = ""
    variant: str = ""
    """As in `account.OperatorRow`."""
    dtype: str = "float32"
    """Of what it moves; the rate's own dtype is the one it computes in."""


_UNNAMED = Named()


def kernel_rate(device: Device, kind: Family, dtype: str, named: Named = _UNNAMED) -> KernelRate | None:
    """What kernels of this family and dtype reach; None where nobody measured the device's vendor.

    By size where single kernels were measured, else the one figure of `achieved.toml`.

    Args:
        named: the operator; on this machine, calibrated, it may have a curve of its own.

    >>> from preflop.hardware.catalog import find
    >>> rate = kernel_rate(find("v100-pcie-32gb"), Family.MATMUL, "float32")
    >>> rate.compute_share(1e11, 1e9) > rate.compute_share(5e9, 1e8)
    True
    """
    moving, relative, said = _moving(device, kind, named)
    if moving is None:
        return None
    if not kind.computes:
        return KernelRate(kind, None, moving, relative, said)
    surface = device_surface(device, kind, dtype, named.op, named.variant)
    if surface is not None:
        return KernelRate(kind, surface, moving, 1.0, said)
    curve = device_curve(device, kind, dtype, named.op, named.variant)
    if curve is None and kind is not Family.MATMUL:
        curve = device_curve(device, Family.MATMUL, dtype) if kind is not Family.BATCHED else None
    if curve is None:
        figure = achieved_matmul(device, dtype)
        if figure is None:
            return None
        curve, said = _constant(figure), (*said, *([figure.caution] if figure.caution else []))
        units = _tiled_units(device, kind)
        if units:
            said = (*said, f"matmuls run in whole tiles, in waves of {units} (NVIDIA's guide to matmul performance)")
        return KernelRate(kind, curve, moving, 1.0, said, units)
    return KernelRate(kind, curve, moving, 1.0, said)


def _tiled_units(device: Device, kind: Family) -> int:
    """Multiprocessors of an NVIDIA device that cut this family's products into tiles; 0 where that is not known."""
    if device.vendor != "NVIDIA" or kind not in (Family.MATMUL, Family.BATCHED) or is_this(device):
        return 0
    figure = device.figures.get("unit_count")
    return int(figure.value) if figure is not None else 0


def _moving(device: Device, kind: Family, named: Named) -> tuple[Curve | None, float, tuple[str, ...]]:
    """(curve of bytes, factor on it, what to say of it)."""
    family = kind if kind in (Family.SOFTMAX, Family.NORM) else Family.ELEMENTWISE
    moves = not kind.computes
    own = device_curve(device, family, named.dtype, named.op if moves else "", named.variant)
    if own is not None:
        return own, 1.0, ()
    plain = device_curve(device, Family.ELEMENTWISE, named.dtype)
    if plain is None:
        figure = achieved_bandwidth(device)
        if figure is None:
            return None, 1.0, ()
        plain = _constant(figure)
    if family is Family.ELEMENTWISE:
        return plain, 1.0, ()
    factor = relative_to_elementwise(family)
    words = (
        f"{family.value} kernels move {factor:.0%} of what element-wise ones do: median of measured devices"
    )
    return plain, factor, (words,)


def _constant(figure: Achieved) -> Curve:
    return Curve((1.0,), (figure.ratio,), figure.basis)
