"""Errors a user can cause. Each says what we got, what we need and what to do.

The command prints the message on standard error and exits with status 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class PreflopError(Exception):
    """Base of every error that is about the user's input and not about our code."""


class UnknownDevice(PreflopError):
    """No device of that name in the catalog."""


class UnknownModel(PreflopError):
    """No model of that name, file or module."""


class UnknownOptimizer(PreflopError):
    """No optimizer of that name."""


class UnknownPrecision(PreflopError):
    """No precision of that name."""


class BadSubject(PreflopError):
    """The model, its batch or its loss cannot be run as a training step."""


class BadNumber(PreflopError):
    """A number that is not finite, not positive or not of the kind that is needed."""


class BadTape(PreflopError):
    """A tape file that cannot be read: damaged, foreign, or written by a newer Preflop."""


class BadFile(PreflopError):
    """A file or folder that cannot be read or written."""


class BadExpression(PreflopError):
    """An expression over named axes that cannot be read, or whose axes have no sizes."""


class HiddenCopy(PreflopError):
    """A view became a copy where `preflop.no_copies` forbids it."""


class NotYet(PreflopError):
    """Asked for something that this version does not price. Never answered with a wrong number."""


_NEAR = 0.6
"""Least `difflib` ratio of names that are called near: its own default. "nope" and "unet" have 0.5."""


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The names close in spelling to `name`, best first; none where none is.

    >>> nearest("h100-smx", ["h100-sxm", "mi300x", "l4"])
    ['h100-sxm']
    >>> nearest("nope", ["unet", "lora"])
    []
    """
    by_fold = {candidate.casefold(): candidate for candidate in known}
    close = difflib.get_close_matches(name.casefold(), by_fold, n=count, cutoff=_NEAR)
    return [by_fold[fold] for fold in close]


def unknown_name(
    error: type[PreflopError], what: str, name: Any, known: Iterable[str], see: str
) -> PreflopError:
    """An error for a name that is not known: what we got, the nearest, where all of them stand.

    >>> print(unknown_name(UnknownDevice, "device", "h100-smx", ["h100-sxm"], "`preflop hardware`"))
    no device named 'h100-smx'.
      Nearest: h100-sxm. All: `preflop hardware`.

    What is no text has no near names:

    >>> print(unknown_name(UnknownDevice, "device", 5, ["h100-sxm"], "`preflop hardware`"))
    a device is named by text, and this is int: 5.
      All: `preflop hardware`.
    """
    if not isinstance(name, str):
        article = "an" if what[0] in "aeiou" else "a"
        return error(f"{article} {what} is named by text, and this is {described(name)}.\n  All: {see}.")
    near = ", ".join(nearest(name, known))
    hint = f"Nearest: {near}. " if near else ""
    return error(f"no {what} named {name!r}.\n  {hint}All: {see}.")


def described(value: Any) -> str:
    """What was given, in words short enough for a message: its type, and itself if that is short.

    >>> described(5), described([0] * 99)
    ('int: 5', 'list')
    """
    words = "" if value is None else repr(value)
    short = 0 < len(words) <= _SHORT and not words.startswith("<") and "\n" not in words
    return f"{type(value).__name__}: {words}" if short else type(value).__name__


_SHORT = 40
"""Characters of a value that a message repeats."""
