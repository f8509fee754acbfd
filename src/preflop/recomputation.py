"""What `recompute=` says: which modules run again in backward, and in which of torch's manners.

A leaf: everything may import it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from preflop.errors import BadSubject, nearest

NONE = "none"


class Manner(str, Enum):
    """How a module is run again (https://docs.pytorch.org/docs/stable/checkpoint.html)."""

    BLOCK = "block"
    """All of it, up to the last tensor that backward needs (`use_reentrant=False`)."""
    SELECTIVE = "selective"
    """All but what is dear to compute: results of matmuls, convolutions and attention are kept
    (`create_selective_checkpoint_contexts`)."""
    REENTRANT = "block-reentrant"
    """All of it, in a backward within backward (`use_reentrant=True`)."""


KEPT_OPERATORS = frozenset(
    {
        "aten.mm",
        "aten.addmm",
        "aten.bmm",
        "aten.baddbmm",
        "aten.convolution",
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_cudnn_attention",
    }
)
"""Operators (default overload) whose results selective recomputation keeps."""
_NAME = re.compile(r"[^\W\d][\w-]*")
"""A module's name, alone. Numbers are none: `block:2` means every second block."""
_MODES = "none, block, selective, block-reentrant"
NO_BLOCKS = (
    "this model has no repeated blocks (members of one nn.ModuleList or nn.Sequential).\n"
    "  Give recompute= a pattern of module names or (in Python) a callable from module name to bool, "
    "or 'none'."
)


@dataclass(frozen=True, slots=True)
class Recomputation:
    """Which modules are run again, and how."""

    manner: Manner
    every: int = 1
    """Of the repeated blocks every so many-th: block numbers every - 1, 2 every - 1, ..."""
    chosen: Callable[[str], bool] | None = None
    """By module name; None: the repeated blocks."""
    words: str = ""
    """As it was asked for."""

    def of_blocks(self, blocks: Sequence[Any]) -> list[Any]:
        """Those of the repeated blocks that are run again.

        >>> parse("block:2").of_blocks(["h.0", "h.1", "h.2", "h.3", "h.4"])
        ['h.1', 'h.3']

        Raises:
            BadSubject: there are fewer.
        """
        if self.every > len(blocks):
            raise BadSubject(
                f"recompute {self.words!r} asks for every {self.every}th block; the model has {len(blocks)}.\n"
                "  Give a smaller number, or 'block' for all of them."
            )
        return list(blocks[self.every - 1 :: self.every])

    def of_modules(self, names: Sequence[str]) -> list[str]:
        """The chosen modules among all of the model's.

        Raises:
            BadSubject: none is chosen.
        """
        assert self.chosen is not None
        found = [name for name in names if name and self.chosen(name)]
        if not found:
            raise BadSubject(self._chose_nothing([name for name in names if name]))
        return found

    def _chose_nothing(self, known: Sequence[str]) -> str:
        """What to say where no module of the model's is chosen."""
        if not self.words:
            return f"recompute= chose no module.\n  It is asked with each module's name: {_some(known)}."
        pattern = self.words.partition(":")[2] or self.words
        first = f"no module matches {pattern!r} (recompute is {self.words!r})."
        if _NAME.fullmatch(self.words):
            # A word alone may have been meant as a mode.
            first = f"recompute is {self.words!r}; it must be one of {_MODES}, or a module's name or pattern, "
            first += "and no module matches it."
        words = (NONE, *(manner.value for manner in Manner)) if pattern == self.words else ()
        near = nearest(pattern, [*words, *known])
        hint = f"Nearest: {', '.join(near)}. " if near else ""
        return f"{first}\n  {hint}Modules: {_some(known)}."


def parse(recompute: Any) -> Recomputation | None:
    """What `recompute=` means; None for "none".

    Words: `block`, `selective`, `block-reentrant`, each alone (every repeated block), with a number
    (`block:2`, every second block), or with a pattern of module names (`selective:encoder.*`); a pattern
    alone means `block:PATTERN`. In a pattern `*` stands for one name of a path, `**` for any number; a
    module's own name is a pattern too.

    Every k-th block starts with the k-th, as torchtitan's selective_ac_option does
    (torchtitan/distributed/activation_checkpoint.py).

    >>> parse("none"), parse("selective").manner.value, parse("block:3").every
    (None, 'selective', 3)
    >>> parse("transformer.h.*").of_modules(["", "transformer", "transformer.h.0", "head"])
    ['transformer.h.0']
    >>> parse("selective:mid").of_modules(["", "down", "mid", "mid.fc"])
    ['mid']
    >>> parse("blok").of_modules(["", "down", "mid"])
    Traceback (most recent call last):
    preflop.errors.BadSubject: recompute is 'blok'; it must be one of none, block, ...

    Raises:
        BadSubject: what is no word, name or pattern, or a number less than 1. A name that no module has is
            refused by `of_modules`, which knows them.
    """
    if callable(recompute):
        return Recomputation(Manner.BLOCK, chosen=recompute)
    if recompute == NONE:
        return None
    word, colon, which = str(recompute).partition(":")
    manners = {manner.value: manner for manner in Manner}
    if word in manners and not colon:
        return Recomputation(manners[word], words=recompute)
    if word in manners and re.fullmatch(r"[1-9]\d*", which):
        return Recomputation(manners[word], every=int(which), words=recompute)
    pattern = which if word in manners else recompute
    if isinstance(pattern, str) and (re.search(r"[.*?\[]", pattern) or _NAME.fullmatch(pattern)):
        manner = manners.get(word, Manner.BLOCK)
        return Recomputation(manner, chosen=_matcher(pattern), words=recompute)
    raise BadSubject(
        f"recompute is {recompute!r}; it must be one of {_MODES} (block:2 for every second block), "
        "a module's name or a pattern of names ('transformer.h.*'), or in Python a callable from module name "
        "to bool."
    )


def alike(recompute: str | Callable[[str], bool]) -> bool:
    """Whether all repeated blocks are treated alike, whatever their number.

    >>> alike("selective"), alike("block:2")
    (True, False)
    """
    wanted = parse(recompute)
    return wanted is None or (wanted.chosen is None and wanted.every == 1)


def _some(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def _matcher(pattern: str) -> Callable[[str], bool]:
    """Whether a module's path matches a pattern.

    >>> [_matcher("h.*")(path) for path in ("h.0", "h.0.mlp", "h")], _matcher("**.mlp")("h.0.mlp")
    ([True, False, False], True)
    """
    pieces = {"**": ".*", "*": "[^.]*", "?": "[^.]"}
    words = re.split(r"(\*\*|\*|\?|\[[^\]]*\])", pattern)
    text = "".join(
        word if word.startswith("[") else pieces.get(word) or re.escape(word) for word in words
    )
    return lambda path: re.fullmatch(text, path) is not None
