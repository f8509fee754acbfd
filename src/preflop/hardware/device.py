"""One device: every figure with its unit in its name, its source and how far to trust it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from preflop.errors import PreflopError
from preflop.hardware.allocator_settings import AllocatorSettings, no_such_allocator
from preflop.units import GIB

CONFIDENCE: dict[str, str] = {
    "V": "vendor text read",
    "Q": "vendor figure quoted by another text",
    "C": "computed",
    "T": "third party",
    "L": "log: printed or measured by a machine",
}
"""What the confidence letter of a figure means."""


class MissingFigure(PreflopError):
    """The catalog has no such figure for the device. Never answered with another device's figure."""


@dataclass(frozen=True)
class Figure:
    """One number (or word) of a data sheet or a log, with where it was read."""

    value: float | int | str
    source: str
    """Kind and place: "vendor: ...", "quote: ...", "log: ...", "third: ...", "derived: ..."."""
    confidence: str
    """One of the letters of CONFIDENCE."""
    note: str = ""


# torch names of a dtype, and the short names people type -> the name under which a peak is kept.
_PEAK_NAMES: dict[str, str] = {
    "fp64": "float64",
    "double": "float64",
    "fp32": "float32",
    "float": "float32",
    "tfloat32": "tf32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp8": "float8",
    "float8_e4m3fn": "float8",
    "float8_e4m3fnuz": "float8",
    "float8_e5m2": "float8",
    "float8_e5m2fnuz": "float8",
    "fp6": "float6",
    "fp4": "float4",
    "float4_e2m1fn_x2": "float4",
}


def peak_name(dtype: str) -> str:
    """The name under which the peak of `dtype` is kept in a device's `peaks`.

    >>> peak_name("torch.float8_e4m3fn"), peak_name("bf16"), peak_name("tf32")
    ('float8', 'bfloat16', 'tf32')
    """
    plain = dtype.casefold().removeprefix("torch.")
    return _PEAK_NAMES.get(plain, plain)


def compute_capability(arch: str) -> tuple[int, int] | None:
    """CUDA's (major, minor) of an architecture's name, or None where it has none.

    >>> compute_capability("Hopper sm_90"), compute_capability("Blackwell GB202 sm_120")
    ((9, 0), (12, 0))
    >>> compute_capability("CDNA3 gfx942") is None
    True
    """
    found = re.search(r"\bsm_(\d+)(\d)\b", arch)
    return (int(found[1]), int(found[2])) if found else None


@dataclass(frozen=True)
class Device:
    """One accelerator as torch sees it (one GCD of an MI250X, one chip of a TPU)."""

    id: str
    name: str
    vendor: str
    arch: str
    aliases: tuple[str, ...]
    """What people type."""
    torch_names: tuple[str, ...]
    """What `torch.cuda.get_device_name` (or its like) reports."""
    figures: Mapping[str, Figure] = field(hash=False)
    """All figures but the peaks; the unit ends each name."""
    peaks: Mapping[str, Figure] = field(hash=False)
    """Dense FLOP/s by dtype. With sparsity only in the figure's note."""
    alias_note: str = ""
    """Which card an ambiguous alias means, and what the others are called."""
    torch_names_basis: str = ""
    """Whether the torch names were seen in logs or are assumed."""
    accumulate: str = ""
    """What fp32 accumulation costs, which torch uses for bf16 always and for fp16 by default."""
    alloc_conf: str = ""
    """What PYTORCH_CUDA_ALLOC_CONF sets on it (`with_alloc_conf`)."""

    def with_alloc_conf(self, text: str) -> Device:
        """The device where torch's caching allocator is set like this.

        Args:
            text: as PYTORCH_CUDA_ALLOC_CONF takes it: "expandable_segments:True,max_split_size_mb:128".

        Raises:
            BadAllocatorSetting: torch would not take it, or the device has no such allocator.
        """
        AllocatorSettings.parse(text)
        if not text:
            return self
        if self.compute_capability is None:
            raise no_such_allocator(text, f"{self.name} is no CUDA device")
        return dataclasses.replace(self, alloc_conf=text)

    @cached_property
    def allocator(self) -> AllocatorSettings:
        """How torch's caching allocator is set on it."""
        return AllocatorSettings.parse(self.alloc_conf)

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """CUDA's (major, minor), or None where it is no CUDA device."""
        return compute_capability(self.arch)

    def figure(self, name: str) -> Figure:
        """The figure of that name.

        Raises:
            MissingFigure: the catalog has none.
        """
        if name not in self.figures:
            raise MissingFigure(
                f"{self.id} has no figure {name!r}.\n  It has: {', '.join(self.figures)}.\n"
                f"  To add it: hardware/catalog/{self.id}.toml, see docs/add-a-gpu.md."
            )
        return self.figures[name]

    @property
    def has_sold_capacity(self) -> bool:
        """Whether a data sheet says what it was sold with: not so for a machine that was measured."""
        return bool({"memory_sold_gb", "memory_sold_gib"} & set(self.figures))

    @property
    def memory_sold_bytes(self) -> int:
        """Capacity as sold: GB is 1e9; 2**30 only where the vendor itself writes GiB."""
        if "memory_sold_gib" in self.figures:
            return int(float(self.figures["memory_sold_gib"].value) * GIB)
        return int(float(self.figure("memory_sold_gb").value) * 10**9)

    @property
    def memory_bytes(self) -> int:
        """Bytes a program can have: what torch reports as total memory where known, else as sold.

        Nothing is subtracted: the CUDA context and other processes come off this.
        """
        total = self.figures.get("torch_total_memory_bytes")
        return int(total.value) if total else self.memory_sold_bytes

    @property
    def memory_basis(self) -> str:
        """In words, what `memory_bytes` stands on."""
        if "torch_total_memory_bytes" in self.figures:
            return "total memory as torch reports it"
        unit = "GiB as the vendor writes" if "memory_sold_gib" in self.figures else "GB as 1e9"
        return f"capacity as sold, {unit} (what torch reports is not known)"

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Bytes per second to and from the device's own memory, as printed by the vendor."""
        return float(self.figure("memory_bandwidth_bytes_per_s").value)

    @property
    def context_bytes(self) -> int | None:
        """Bytes the CUDA context takes outside the allocator, where measured on this die, else None."""
        context = self.figures.get("context_bytes")
        return int(context.value) if context else None

    @property
    def inter_node_bytes_per_s(self) -> float | None:
        """Bytes per second of one device to another node, one way, or None. (Vendors print bits.)"""
        rate = self.figures.get("inter_node_bytes_per_s")
        return float(rate.value) if rate else None

    def peak_flops_per_s(self, dtype: str) -> float:
        """Dense peak FLOP/s of `dtype`, a multiply-add counted as two.

        Args:
            dtype: torch's name ("bfloat16", "float8_e4m3fn", "int8"), "tf32", or a short name ("bf16").
                "float32" and "float64" are the ordinary units; "float64_tensor" the matrix units.

        Raises:
            MissingFigure: the device has no figure for it. There is no default.
        """
        name = peak_name(dtype)
        if name not in self.peaks:
            raise MissingFigure(
                f"{self.id} has no dense peak for {dtype!r}.\n  It has: {', '.join(self.peaks)}.\n"
                f"  Choose one of these, or add a figure with its source: docs/add-a-gpu.md."
            )
        return float(self.peaks[name].value)

    def require_fp8(self) -> None:
        """Refuse a device that multiplies no fp8, for a step whose linears do.

        Raises:
            MissingFigure: it has no dense peak for fp8.
        """
        if peak_name("fp8") not in self.peaks:
            raise MissingFigure(
                f"{self.name} has no fp8 matrix units, and --precision fp8 is for devices that have.\n"
                "  Give another --device (`preflop hardware` shows peaks), or take --precision bf16-mixed."
            )

    def matmul_peak_flops_per_s(self, dtype: str) -> float:
        """Dense peak FLOP/s of a matrix product in `dtype`.

        The matrix units' figure where the device has its own for this dtype (cuBLAS runs float64 on
        the tensor cores of an H100: 66.9e12, while the ordinary units make 33.5e12).

        Raises:
            MissingFigure: the device has no figure for it.
        """
        tensor = f"{peak_name(dtype)}_tensor"
        return self.peak_flops_per_s(tensor if tensor in self.peaks else dtype)
