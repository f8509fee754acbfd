"""While recording, compiled code runs as the Python it was made from.

A compiled graph would be compiled for fake tensors, which takes long, leaves its cache behind and hides
the operators. torch._dynamo is not imported for this: where it is not loaded, nothing is compiled yet.
(Newer torch loads it for any fake tensor.)
"""

from __future__ import annotations

import functools
import sys
import warnings
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import torch
from torch import nn

_FLEX = "torch.nn.attention.flex_attention"


def compiled_words(model: nn.Module) -> list[str]:
    """What is assumed of code that does not run as its Python: compiled, or TorchScript's."""
    words = []
    modules = list(model.modules())
    if any(type(m).__name__ == "OptimizedModule" or m._compiled_call_impl is not None for m in modules):
        words.append(
            "compiled parts are recorded as the eager Python that they were made from: fused kernels keep and "
            "move less."
        )
    if any(isinstance(m, torch.jit.ScriptModule) for m in modules):
        words.append(
            "TorchScript specialises scripted parts while they run: a first step may keep more or less than "
            "the recorded one."
        )
    return words


class Eager:
    """Makes `torch.compile`d code and flex_attention run eagerly. Use as a context manager, inside
    `warnings.catch_warnings`."""

    def __init__(self) -> None:
        self._undo = ExitStack()
        self._forced = False

    def __enter__(self) -> Eager:
        original = torch.compile

        @functools.wraps(original)
        def compile_later(*args: Any, **kwargs: Any) -> Any:
            compiled = original(*args, **kwargs)
            self._force()
            return compiled

        # The recorder's global hooks see a compiled module twice, as its own and as the wrapped one.
        warnings.filterwarnings(
            "ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks"
        )
        self._set(torch, "compile", compile_later)
        self._force()
        self._flex()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _force(self) -> None:
        if self._forced or "torch._dynamo" not in sys.modules:
            return
        self._forced = True
        self._undo.enter_context(torch.compiler.set_stance("force_eager"))

    def _flex(self) -> None:
        """flex_attention as the target would run it: one kernel, with a backward, also on fake CPU
        tensors, for which torch's own check of the device refuses a backward."""
        flex = sys.modules.get(_FLEX)
        if flex is None:
            return
        from preflop.record.higher_order import flex_attention

        self._set(flex, "flex_attention_hop", functools.partial(flex_attention, hasattr(flex, "AuxRequest")))
        self._set(flex, "_validate_device", _any_device)
        if hasattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"):
            self._set(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", value=True)

    def _set(self, module: ModuleType, name: str, value: Any) -> None:
        self._undo.callback(setattr, module, name, getattr(module, name))
        setattr(module, name, value)


def _any_device(*_: Any) -> None:
    """No device is wrong for a recording."""
