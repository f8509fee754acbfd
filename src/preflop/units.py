"""Units at the display edge. Inside Preflop: bytes and FLOPs are integers, times are SI seconds.

GB is 1e9 bytes, GiB is 2**30 bytes.
"""

from __future__ import annotations

KIB = 2**10
MIB = 2**20
GIB = 2**30

AVX2_BYTES, AVX512_BYTES = 32, 64
"""A vector register of each."""

# Bytes of one element, by torch's name of the dtype (torch.dtype.itemsize).
DTYPE_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "complex128": 16,
    "complex64": 8,
    "complex32": 4,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
    "qint8": 1,
    "quint8": 1,
    "qint32": 4,
}


def a_dtype(name: str) -> str:
    """The name of a dtype with its article, for sentences.

    >>> a_dtype("int64"), a_dtype("uint8"), a_dtype("float32")
    ('an int64', 'a uint8', 'a float32')
    """
    return f"{'an' if name.startswith('int') else 'a'} {name}"


def bytes_text(count: float) -> str:
    """Bytes as people read them, in binary units.

    >>> bytes_text(512), bytes_text(2_415_919_104)
    ('512 B', '2.25 GiB')
    """
    unit, unit_bytes = bytes_unit(count)
    return f"{count:.0f} B" if unit == "B" else f"{count / unit_bytes:.2f} {unit}"


def bytes_unit(count: float) -> tuple[str, int]:
    """The unit in which people read so many bytes, and its bytes.

    >>> bytes_unit(512), bytes_unit(2_415_919_104)
    (('B', 1), ('GiB', 1073741824))
    """
    units = {"TiB": 2**40, "GiB": GIB, "MiB": MIB, "KiB": KIB}
    return next(((unit, size) for unit, size in units.items() if abs(count) >= size), ("B", 1))


def si_text(value: float, unit: str = "") -> str:
    """A number with an SI prefix, three significant digits.

    >>> si_text(989.4e12, "FLOP/s"), si_text(0)
    ('989 TFLOP/s', '0')
    """
    size = float(value)
    for factor, prefix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(size) >= factor:
            return f"{size / factor:.3g} {prefix}{unit}"
    return f"{size:.3g} {unit}".rstrip()


def time_text(seconds: float) -> str:
    """Seconds as people read them.

    >>> time_text(0.0123), time_text(3.2e-6), time_text(90)
    ('12.3 ms', '3.2 us', '90 s')
    """
    if seconds == 0:
        return "0 s"
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
