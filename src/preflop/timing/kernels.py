"""Which share of peak and bandwidth a kernel of a given size reaches: curves of measured kernels.

The curves stand in `curves.toml` (written by `bench/time_curves.py`, attention by hand from papers) and in
the file that `preflop calibrate` writes for this machine. Where nobody measured a device's kernels as a
function of their size, the single figures of `achieved.toml` stand in.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from importlib import resources
from statistics import median
from typing import TYPE_CHECKING, Any

from preflop.hardware.device import Device
from preflop.timing.products import Products, products_from
from preflop.timing.surface import Surface, surface_from

if sys.version_info >= (3, 11) or TYPE_CHECKING:
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    import numpy as np


class Family(str, Enum):
    """Kernels that are measured together."""

    MATMUL = "matmul"
    BATCHED = "batched"
    CONVOLUTION = "convolution"
    RECURRENT = "recurrent"
    FLASH_FORWARD = "flash_forward"
    FLASH_BACKWARD = "flash_backward"
    CUDNN_FORWARD = "cudnn_forward"
    CUDNN_BACKWARD = "cudnn_backward"
    EFFICIENT_FORWARD = "efficient_forward"
    EFFICIENT_BACKWARD = "efficient_backward"
    SOFTMAX = "softmax"
    NORM = "norm"
    ELEMENTWISE = "elementwise"

    @property
    def attends(self) -> bool:
        """Fused attention, forward or backward."""
        return "forward" in self.value or "backward" in self.value

    @property
    def computes(self) -> bool:
        """Timed by its FLOPs: products, or attention."""
        return self in _PRODUCTS or self.attends


CALIBRATED = "single operators as `preflop calibrate` measured them here, by size"
_BATCHED = ("aten.bmm", "aten.baddbmm", "aten._grouped_mm")
_PRODUCTS = (Family.MATMUL, Family.BATCHED, Family.CONVOLUTION, Family.RECURRENT)
_NORMS = ("layer_norm", "rms_norm", "group_norm", "batch_norm", "cudnn_batch_norm")
# Attention's backward computes the scores anew: five products where the model's FLOPs count four.
# Source: FlashAttention-2 (arXiv 2307.08691), section 4.1: backward is 2.5 times the forward.
BACKWARD_PRODUCTS = 2.5 / 2


def family(op: str, kind: str) -> Family:
    """The family of an operator.

    >>> family("aten.addmm", "matmul").value, family("aten._log_softmax", "other").value
    ('matmul', 'softmax')
    >>> family("aten._scaled_dot_product_flash_attention_backward", "attention").value
    'flash_backward'
    """
    if kind == "attention":
        kernel = next((name for name in ("flash", "cudnn") if name in op), "efficient")
        return Family(f"{kernel}_{'backward' if 'backward' in op else 'forward'}")
    if kind == "matmul":
        if "lstm" in op or "gru" in op or "rnn" in op:
            return Family.RECURRENT
        return Family.BATCHED if op in _BATCHED else Family.MATMUL
    if kind == "convolution":
        return Family.CONVOLUTION
    if "softmax" in op:
        return Family.SOFTMAX
    return Family.NORM if any(name in op for name in _NORMS) else Family.ELEMENTWISE


@dataclass(frozen=True)
class Curve:
    """A share as a function of size: linear in the logarithm of the size, constant beyond the ends."""

    sizes: tuple[float, ...]
    shares: tuple[float, ...]
    basis: str

    def at(self, size: float) -> float:
        """The share at a size.

        >>> Curve((10.0, 1000.0), (0.2, 0.6), "").at(100.0)
        0.4
        """
        if size <= self.sizes[0]:
            return self.shares[0]
        if size >= self.sizes[-1]:
            return self.shares[-1]
        right = bisect_right(self.sizes, size)
        low, high = math.log10(self.sizes[right - 1]), math.log10(self.sizes[right])
        part = (math.log10(size) - low) / (high - low)
        return self.shares[right - 1] + part * (self.shares[right] - self.shares[right - 1])

    def at_each(self, sizes: np.ndarray) -> np.ndarray:
        """The shares at many sizes."""
        import numpy as np

        # np.interp clips by itself; the logarithm of nothing does not matter, as nothing takes no time.
        logs = np.log10(np.maximum(sizes, 1e-300))
        return np.asarray(np.interp(logs, np.log10(self.sizes), self.shares))


def size_of(kind: Family, flops: float, moved: float) -> float:
    """What a curve of the family is over: bytes, FLOPs, FLOPs per byte or the sequence's length.

    Args:
        flops: of one call (attended pairs only).
        moved: bytes read and written by one call.

    Fused attention forward reads and writes four tensors of batch x length x width in 16 bits and does
    4·batch·length²·width FLOPs, so its length is twice its FLOPs per byte; backward moves twice as many
    tensors for twice the FLOPs.
    """
    if kind is Family.BATCHED:
        return flops / moved if moved else 0.0
    if kind.attends:
        return 2 * flops / moved if moved else 0.0
    if kind in (Family.MATMUL, Family.CONVOLUTION, Family.RECURRENT):
        return flops
    return moved


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    text = (resources.files("preflop.timing") / "curves.toml").read_text("utf-8")
    return tomllib.loads(text)


def curve_from(points: Sequence[Sequence[float]], basis: str) -> Curve:
    """A curve from [size, share] points."""
    return Curve(tuple(float(x) for x, _ in points), tuple(float(y) for _, y in points), basis)


def device_surface(device: Device, kind: Family, dtype: str, op: str, variant: str = "") -> Surface | Products | None:
    """What `preflop calibrate` measured of an operator that computes, else of its family; None elsewhere."""
    own = _own(device)
    surfaces = own.get("surfaces", {})
    points = surfaces.get(f"{op} {dtype}") or surfaces.get(f"{kind.value} {dtype}")
    if not points:
        return None
    surface = surface_from(points, CALIBRATED)
    grids = own.get("products", {}) if kind is Family.MATMUL else {}
    for name in (f"{op}({variant})", f"aten.mm({variant})", "aten.mm(NT)"):
        grid = products_from(grids.get(f"{name} {dtype}", ()), surface)
        if grid is not None:
            return grid
    return surface


def device_curve(device: Device, kind: Family, dtype: str, op: str = "", variant: str = "") -> Curve | None:
    """The measured curve of a family of kernels on a device; None where nobody measured one.

    Args:
        op: this machine's calibration has curves of single operators, too, by variant and dtype.

    Softmax and norms of a device whose element-wise kernels alone were measured, or none: see `moving_share`.
    """
    own = _own(device)
    if "ops" in own:
        for name in _own_names(kind, dtype, op, variant):
            points = own["ops"].get(name)
            if points:
                return curve_from(points, CALIBRATED)
    name = f"{kind.value}_{dtype}" if kind in _PRODUCTS else kind.value
    if name in own:
        source = own.get("source", "")
        what = _table()["sources"].get(source, source)
        words = name.replace("_", " ")
        return curve_from(own[name], f"{device.name} {words} kernels as measured by size ({what})")
    if kind.attends and dtype in ("bfloat16", "float16"):
        return _attention(device, kind)
    return None


def own_name(op: str, variant: str, dtype: str) -> str:
    """What a calibration calls the kernel.

    >>> own_name("aten.gelu", "tanh", "bfloat16"), own_name("aten.exp", "", "float32")
    ('aten.gelu(tanh) bfloat16', 'aten.exp float32')
    """
    return f"{op}({variant}) {dtype}" if variant else f"{op} {dtype}"


def _own_names(kind: Family, dtype: str, op: str, variant: str) -> Iterator[str]:
    """What may stand for a kernel in a calibration, nearest first: itself, its operator in another variant or in
    float32, its family in the same dtype."""
    if op:
        for known in dict.fromkeys((dtype, "float32")):
            yield own_name(op, variant, known)
            yield own_name(op, "", known)
    if dtype:
        yield f"{kind.value} {dtype}"


def _own(device: Device) -> Mapping[str, Any]:
    from preflop.timing.this import is_this, this_curves

    if is_this(device):
        return this_curves()
    table = _table()
    found: Mapping[str, Any] = table["devices"].get(table["same_die"].get(device.id, device.id), {})
    return found


def _attention(device: Device, kind: Family) -> Curve | None:
    capability = device.compute_capability
    if capability is None:
        return None
    table = _table()["attention"]
    found = table["hopper" if capability >= (9, 0) else "ampere"]
    points = found.get(kind.value)
    if points is None:
        return None
    return curve_from(points, f"fused attention ({_table()['sources'][found['source']]})")


@lru_cache(maxsize=4)
def relative_to_elementwise(kind: Family) -> float:
    """Share of what element-wise kernels move per second that softmax or norms do: median of devices.

    >>> 0.5 < relative_to_elementwise(Family.NORM) < 1
    True
    """
    ratios = []
    for own in _table()["devices"].values():
        if kind.value in own and "elementwise" in own:
            ratios.append(own[kind.value][-1][1] / own["elementwise"][-1][1])
    return float(median(ratios))
