"""In which number format weights, gradients and optimizer states are kept, by the precision's name.

A precision says where each of the four columns of the memory table gets its bytes per element. The
names are the ones `preflop account --precision` takes. No torch: the recorder turns the names of
dtypes into torch's.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from preflop.errors import UnknownPrecision, unknown_name
from preflop.units import DTYPE_BYTES

LOST_SUMS = "small ones are lost when microbatches add up: bf16-mixed adds them up in fp32"
"""Of gradients that microbatches add up in 16 bits: bfloat16 holds 8 bits of a sum, float16 11."""


@dataclass(frozen=True, slots=True)
class Precision:
    """How one training run keeps its numbers. Dtypes are torch's names without the module."""

    name: str
    parameter_dtype: str
    autocast_dtype: str | None
    """What autocast casts matmul-like operators' inputs to; None: the step runs without autocast."""
    gradient_dtype: str
    state_dtype: str
    """Of the tensors the optimizer keeps per parameter (not of its step counter)."""
    master_copy: bool = False
    """The optimizer holds an fp32 copy of each parameter and updates that."""
    tf32: bool = False
    """fp32 matmuls run on tensor cores with 10 mantissa bits; bytes stay those of fp32."""
    fp8_linears: bool = False
    """Linears of the blocks multiply in fp8, each by its own scales; the rest runs as autocast says."""
    scaled: bool = False
    """The loss is multiplied before backward and gradients are divided after it (fp16 underflows)."""
    meaning: str = ""

    @property
    def compute_dtype(self) -> str:
        """The format matmuls run in: "tf32" or "float8" where asked, else autocast's, else the parameters'.

        >>> find_precision("bf16-mixed").compute_dtype, find_precision("tf32").compute_dtype
        ('bfloat16', 'tf32')
        """
        if self.fp8_linears:
            return "float8"
        return "tf32" if self.tf32 else self.autocast_dtype or self.parameter_dtype

    @property
    def parameter_bytes(self) -> int:
        """Bytes of one parameter as forward and backward read it (without a master copy)."""
        return DTYPE_BYTES[self.parameter_dtype]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one parameter's gradient."""
        return DTYPE_BYTES[self.gradient_dtype]

    @property
    def master_bytes(self) -> int:
        """Bytes of one parameter's fp32 master copy; 0 where there is none."""
        return DTYPE_BYTES["float32"] if self.master_copy else 0

    def state_bytes(self, states_per_parameter: int, *, quantised: bool = False) -> int:
        """Bytes the optimizer keeps per parameter: its states and, where there is one, the master copy.

        Args:
            quantised: states are one byte each, whatever the precision (without their blocks' absmax).

        >>> find_precision("bf16-master").state_bytes(2)        # 4 (copy) + 2 * 4
        12
        """
        each = 1 if quantised else DTYPE_BYTES[self.state_dtype]
        return self.master_bytes + states_per_parameter * each

    def bytes_per_parameter(self, states_per_parameter: int = 2, *, quantised: bool = False) -> int:
        """Bytes per parameter over weights, gradients and optimizer states; 2 states are AdamW's.

        >>> [find_precision(name).bytes_per_parameter() for name in ("fp32", "bf16", "bf16-fp32-states")]
        [16, 8, 12]
        """
        states = self.state_bytes(states_per_parameter, quantised=quantised)
        return self.parameter_bytes + self.gradient_bytes + states


def _of(name: str, dtype: str, meaning: str, **more: object) -> Precision:
    """A precision whose weights, gradients and states are `dtype` unless `more` says otherwise."""
    columns = {"parameter_dtype": dtype, "gradient_dtype": dtype, "state_dtype": dtype}
    return Precision(name, **{**columns, "autocast_dtype": None, "meaning": meaning, **more})  # type: ignore[arg-type]


PRECISIONS: dict[str, Precision] = {
    precision.name: precision
    for precision in (
        _of("fp32", "float32", "everything in fp32"),
        _of("tf32", "float32", "everything kept in fp32, matmuls on tensor cores in TF32", tf32=True),
        _of(
            "bf16-mixed",
            "float32",
            "autocast to bf16 over fp32 weights, gradients and states",
            autocast_dtype="bfloat16",
        ),
        _of(
            "fp16-mixed",
            "float32",
            "autocast to fp16 over fp32 weights, gradients and states, with loss scaling",
            autocast_dtype="float16",
            scaled=True,
        ),
        _of(
            "fp8",
            "float32",
            "linears of the blocks in fp8 with delayed scaling, everything else as in bf16-mixed",
            autocast_dtype="bfloat16",
            fp8_linears=True,
        ),
        _of("bf16", "bfloat16", "everything in bf16, optimizer states too, as torch makes them"),
        _of(
            "bf16-fp32-states",
            "bfloat16",
            "bf16 weights and gradients, fp32 optimizer states",
            state_dtype="float32",
        ),
        _of(
            "bf16-master",
            "bfloat16",
            "bf16 weights and gradients, fp32 master copy and optimizer states",
            state_dtype="float32",
            master_copy=True,
        ),
    )
}


def find_precision(name: Any) -> Precision:
    """The precision of that name, exactly as written or in other case.

    >>> find_precision("bf16-mixed").parameter_dtype
    'float32'
    >>> find_precision("bf17")
    Traceback (most recent call last):
    preflop.errors.UnknownPrecision: no precision named 'bf17'.
      Nearest: bf16. All: fp32, tf32, ...

    Raises:
        UnknownPrecision: there is none; the message names the nearest.
    """
    found = PRECISIONS.get(name.strip().casefold()) if isinstance(name, str) else None
    if found is None:
        raise unknown_name(UnknownPrecision, "precision", name, PRECISIONS, ", ".join(PRECISIONS))
    return found


def update_apart(name: str) -> str:
    """The first precision by whose rules forward and backward are the same: only the update may be another.

    >>> [update_apart(name) for name in ("bf16-master", "tf32", "bf16-mixed", "fp8")]
    ['bf16', 'fp32', 'bf16-mixed', 'fp8']
    """
    step = _up_to_update(find_precision(name))
    return next(other.name for other in PRECISIONS.values() if _up_to_update(other) == step)


def _up_to_update(precision: Precision) -> Precision:
    """The precision without its name, without what the update keeps, and without the rate of its matmuls."""
    return dataclasses.replace(
        precision, name="", meaning="", state_dtype="", master_copy=False, tf32=False
    )
