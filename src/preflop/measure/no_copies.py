"""Forbid hidden copies while code runs: a view that becomes a copy raises at its line.

`reshape`, `flatten`, `contiguous`, einops and matmul all copy through one operator, `aten::clone` with a
memory format. While `no_copies` is active that operator has a kernel of ours; every other operator runs
as always, so that a step pays only for its copies.
"""

from __future__ import annotations

import linecache
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from preflop.errors import BadSubject, HiddenCopy, described
from preflop.strides import is_permuted, repeats
from preflop.units import bytes_text

_QUIET = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(__file__) + os.sep,
    f"{os.sep}einops{os.sep}",
    f"{os.sep}contextlib.py",
)
_ACTIVE = threading.local()
_LOCK = threading.Lock()
_USERS = 0
_LIBRARY: torch.library.Library | None = None


@contextmanager
def no_copies(*, allow: Callable[[str], bool] | None = None, backward: bool = False) -> Iterator[None]:
    """Raise `HiddenCopy`, at the user's line, when a view becomes a copy in this thread.

    Raised for what `reshape`, `flatten`, `view` of einops, `contiguous` and the operands of `matmul` have
    to copy. Not for `clone()`, casts, `cat` or results of arithmetic: these are asked for.

    Args:
        allow: from "file.py:12" to whether a copy of that line may pass.
        backward: also while autograd runs.

    >>> x = torch.zeros(2, 3)
    >>> with no_copies():
    ...     same = x.reshape(3, 2)                   # a view
    >>> with no_copies():
    ...     x.t().reshape(6)
    Traceback (most recent call last):
    preflop.errors.HiddenCopy: (3, 2) with strides (1, 3) is copied: 24 B.
      ...
    """
    previous = getattr(_ACTIVE, "rule", None)
    _ACTIVE.rule = (allow, backward)
    _install()
    try:
        yield
    finally:
        _remove()
        _ACTIVE.rule = previous


def same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors share memory: one is a view of the other, or both of a third.

    >>> x = torch.zeros(2, 3)
    >>> same_storage(x, x.t()), same_storage(x, x.t().contiguous())
    (True, False)

    Raises:
        BadSubject: one of them is no tensor, or has no storage to share (sparse, nested).
    """
    for given in (a, b):
        if not isinstance(given, torch.Tensor) or given.layout is not torch.strided:
            layout = f", {given.layout}" if isinstance(given, torch.Tensor) else ""
            raise BadSubject(f"same_storage compares two dense tensors, and was given {described(given)}{layout}.")
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def _install() -> None:
    """Give clone a kernel of ours, once for all who asked."""
    global _USERS, _LIBRARY  # noqa: PLW0603 - one table of kernels in a process
    with _LOCK:
        _USERS += 1
        if _USERS > 1:
            return
        _LIBRARY = torch.library.Library("aten", "IMPL")
        for key in ("CPU", "CUDA") if torch.cuda.is_available() else ("CPU",):
            _LIBRARY.impl("clone", _clone, key)


def _remove() -> None:
    global _USERS, _LIBRARY  # noqa: PLW0603
    with _LOCK:
        _USERS -= 1
        if _USERS == 0 and _LIBRARY is not None:
            _LIBRARY._destroy()
            _LIBRARY = None


def _clone(source: torch.Tensor, *, memory_format: torch.memory_format | None = None) -> torch.Tensor:
    """What aten::clone does (ATen/native/TensorFactories.cpp), after asking whether it may."""
    rule = getattr(_ACTIVE, "rule", None)
    if rule is not None and memory_format not in (None, torch.preserve_format):
        _check(source, *rule)
    made = torch.empty_like(source, memory_format=memory_format or torch.preserve_format)
    return made.copy_(source)


def _check(source: torch.Tensor, allow: Callable[[str], bool] | None, backward: bool) -> None:
    in_backward = torch._C._current_graph_task_id() != -1
    if in_backward and not backward:
        return
    place, code = _user_line(sys._getframe(2))
    if allow is not None and allow(place):
        return
    shape, strides = tuple(source.shape), tuple(source.stride())
    size = bytes_text(source.numel() * source.element_size())
    raise HiddenCopy(
        f"{shape} with strides {strides} is copied: {size}.\n"
        f"  At {place}: {code}\n  {_advice(shape, strides)} `preflop copies` tells what else the step copies."
    )


def _advice(shape: tuple[int, ...], strides: tuple[int, ...]) -> str:
    if repeats(shape, strides):
        return "It repeats elements (stride 0): keep the axis broadcast."
    if is_permuted(shape, strides):
        return "Its axes are permuted: have it written in this order, or take it as it is."
    return "It is cut from a larger tensor: keep the whole, or cut along the outermost axis."


def _user_line(frame: FrameType | None) -> tuple[str, str]:
    """The innermost line outside of torch, einops and this file: "file.py:12", and its text."""
    while frame is not None:
        path = frame.f_code.co_filename
        if not any(quiet in path for quiet in _QUIET) and not path.startswith("<frozen"):
            text = linecache.getline(path, frame.f_lineno).strip()
            return f"{os.path.basename(path)}:{frame.f_lineno}", text
        frame = frame.f_back
    return "(no line)", ""
