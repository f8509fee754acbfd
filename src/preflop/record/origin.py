"""Where a call comes from: phase, module and the user's line.

Forward: the innermost module (kept by global module hooks that exist only while recording) and the
nearest frame outside torch and Preflop. Backward: the autograd node that is running, by its sequence
number, gives the module and line of the forward call that made it
(https://docs.pytorch.org/docs/stable/autograd.html, profiler section on sequence numbers).
"""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from preflop.tape.events import Phase

TORCH_DIR = os.path.dirname(torch.__file__) + os.sep
PREFLOP_DIR = os.path.dirname(os.path.dirname(__file__)) + os.sep
# Frames of these say nothing about the user's line.
_QUIET = tuple(
    [PREFLOP_DIR + room + os.sep for room in ("record", "measure")]
    + [PREFLOP_DIR + "api.py"]
)


_OPTIMIZER_FILES = {
    os.path.join("optim", "optimizer.py"),
    os.path.join("amp", "grad_scaler.py"),
    os.path.join("nn", "utils", "clip_grad.py"),
}
# Functions of the gradient scaler that belong to the loss, not to the update.
_SCALES_THE_LOSS = {"scale", "_lazy_init_scale_growth_tracker"}


class FrameKind:
    """What a Python frame tells of the phase."""

    USER = 0
    QUIET = 1
    ENGINE = 2
    CHECKPOINT = 3
    OPTIMIZER = 4
    LOOP = 5


class Origin(NamedTuple):
    """Where a call came from: its phase, and the numbers of its module and source line."""

    phase: Phase
    module: int
    source: int


_current_node = torch._C._current_autograd_node
_next_sequence = torch._C._autograd._get_sequence_nr


class Origins:
    """Tells the origin of the call that is being dispatched. Use as a context manager."""

    def __init__(self) -> None:
        self.modules: list[str] = [""]
        self.module_types: list[str] = [""]
        self.sources: list[str] = [""]
        self._source_ids: dict[str, int] = {"": 0}
        self._lines: dict[tuple[CodeType, int], int] = {}
        self._kinds: dict[CodeType, int] = {}
        self._module_ids: dict[int, int] = {}
        self._held: list[nn.Module] = []
        self._stack: list[int] = []
        self._by_sequence: dict[int, tuple[int, int]] = {}
        self._last_sequence = -1
        self.node = -1
        """Sequence number of the backward node that ran the last backward call."""
        self._handles: list[Any] = []
        self._parameter_modules: dict[int, int] = {}

    # -- modules ---------------------------------------------------------------------------------

    def name_modules(self, root: nn.Module, prefix: str = "") -> None:
        """Give every submodule of `root` its dotted path."""
        for name, module in root.named_modules():
            path = f"{prefix}.{name}" if prefix and name else (prefix or name)
            if id(module) in self._module_ids:
                continue
            if path == "":
                number = 0
                self.module_types[0] = type(module).__name__
            else:
                number = len(self.modules)
                self.modules.append(path)
                self.module_types.append(type(module).__name__)
            self._module_ids[id(module)] = number
            self._held.append(module)
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._parameter_modules.setdefault(id(parameter), number)

    def number_of(self, key: int) -> int | None:
        """The number of the module with this `id`, where it has a path."""
        return self._module_ids.get(key)

    def __enter__(self) -> Origins:
        self._handles = [
            torch_module.register_module_forward_pre_hook(self._enter_module),
            torch_module.register_module_forward_hook(self._leave_module, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._stack.clear()
        self._held.clear()

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        number = self._module_ids.get(id(module))
        if number is None:
            parent = self.modules[self._stack[-1]] if self._stack else ""
            kind = type(module).__name__
            self.name_modules(module, f"{parent}.{kind}" if parent else kind)
            number = self._module_ids[id(module)]
        self._stack.append(number)

    def _leave_module(self, module: nn.Module, _args: Any, _out: Any) -> None:
        if self._stack:
            self._stack.pop()

    # -- one call --------------------------------------------------------------------------------

    def of_call(self) -> Origin:
        """Origin of the call being dispatched now."""
        phase, source = self._look_at_frames(sys._getframe(2))
        if phase is Phase.BACKWARD:
            return self._of_backward(source)
        module = self._stack[-1] if self._stack else 0
        if phase is not Phase.OPTIMIZER:
            following = _next_sequence()
            if following != self._last_sequence:
                self._by_sequence[following - 1] = (module, source)
                self._last_sequence = following
        return Origin(phase, module, source)

    def line(self) -> int:
        """The innermost line of the user's."""
        return self._look_at_frames(sys._getframe(2))[1]

    def line_now(self) -> str:
        """The user's line that the call being dispatched comes from, as the tape names it; "" if none."""
        return self.sources[self.line()]

    def in_engine(self) -> bool:
        """Whether this call comes from the engine or a node of torch's own, not from Python code."""
        frame: FrameType | None = sys._getframe(3)
        while frame is not None:
            code = frame.f_code
            kind = self._kinds.get(code)
            if kind is None:
                kind = self._kinds[code] = _kind_of(code)
            if kind != FrameKind.QUIET:
                return kind == FrameKind.ENGINE
            frame = frame.f_back
        return False

    def _of_backward(self, source: int) -> Origin:
        node = _current_node()
        if node is None:
            self.node = -1
            return Origin(Phase.BACKWARD, 0, source)
        self.node = node._sequence_nr()
        module, line = self._by_sequence.get(self.node, (0, 0))
        if not module and hasattr(node, "variable"):
            module = self._parameter_modules.get(id(node.variable), 0)
        return Origin(Phase.BACKWARD, module, source or line)

    def _look_at_frames(self, frame: FrameType | None) -> tuple[Phase, int]:
        """Phase, and the innermost user line below whatever decides the phase."""
        kinds = self._kinds
        source = -1
        recomputes = False
        while frame is not None:
            code = frame.f_code
            kind = kinds.get(code)
            if kind is None:
                kind = kinds[code] = _kind_of(code)
            if kind == FrameKind.USER:
                if source < 0:
                    source = self._line(code, frame.f_lineno)
            elif kind == FrameKind.ENGINE:
                return Phase.RECOMPUTE if recomputes else Phase.BACKWARD, max(source, 0)
            elif kind == FrameKind.OPTIMIZER:
                return Phase.OPTIMIZER, max(source, 0)
            elif kind == FrameKind.CHECKPOINT:
                # The innermost one may be selective recomputation's mode, with the user's line above it.
                recomputes = recomputes or _current_node() is not None
                if recomputes and source >= 0:
                    return Phase.RECOMPUTE, source
            elif kind == FrameKind.LOOP:
                break
            frame = frame.f_back
        return Phase.FORWARD, max(source, 0)

    def _line(self, code: CodeType, line: int) -> int:
        number = self._lines.get((code, line))
        if number is None:
            text = f"{short_path(code.co_filename)}:{line}"
            number = self._source_ids.get(text)
            if number is None:
                number = self._source_ids[text] = len(self.sources)
                self.sources.append(text)
            self._lines[code, line] = number
        return number


def short_path(path: str) -> str:
    """A path a person recognises: relative to here, else from its package folder on.

    >>> short_path("/somewhere/site-packages/transformers/models/gpt2/modeling_gpt2.py")
    'transformers/models/gpt2/modeling_gpt2.py'
    """
    here = os.getcwd() + os.sep
    if "site-packages" + os.sep in path:
        return path.rsplit("site-packages" + os.sep, 1)[1]
    if path.startswith(PREFLOP_DIR):
        return "preflop" + os.sep + path[len(PREFLOP_DIR) :]
    if path.startswith(here):
        return path[len(here) :]
    return os.sep.join(path.split(os.sep)[-2:])


def _kind_of(code: CodeType) -> int:
    path = code.co_filename
    if path.startswith(TORCH_DIR):
        rest = path[len(TORCH_DIR) :]
        if rest == os.path.join("utils", "checkpoint.py"):
            return FrameKind.CHECKPOINT
        if rest == os.path.join("autograd", "graph.py") and code.co_name == "_engine_run_backward":
            return FrameKind.ENGINE
        if rest == os.path.join("autograd", "__init__.py") and code.co_name in ("backward", "grad"):
            return FrameKind.ENGINE
        if rest in _OPTIMIZER_FILES and code.co_name not in _SCALES_THE_LOSS:
            return FrameKind.OPTIMIZER
        return FrameKind.QUIET
    if path.startswith(_QUIET):
        return FrameKind.LOOP if code.co_name in ("train_step", "record") else FrameKind.QUIET
    if path.startswith("<") or f"{os.sep}einops{os.sep}" in path:
        return FrameKind.QUIET
    return FrameKind.USER
