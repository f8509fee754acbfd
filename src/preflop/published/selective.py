"""torchtitan's selective recomputation: a block keeps attention and every second matmul, and computes the rest again.

Source: pytorch/torchtitan, torchtitan/parallelisms/parallelize_llama.py (2024), `_save_list` and `_get_custom_policy`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_MATMUL = "aten::mm"
_KEPT = frozenset(
    {_MATMUL} | {f"aten::_scaled_dot_product_{kernel}_attention" for kernel in ("flash", "efficient", "cudnn")}
)


def save_every_second_matmul(blocks: Iterable[nn.Module]) -> None:
    """Set it on blocks that nobody else holds."""
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=_contexts)


def _contexts() -> Any:
    """Forward's and recomputation's own count of matmuls, so that both choose the same ones."""
    seen: Counter[bool] = Counter()

    def choose(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        del args, kwargs
        second = False
        if op.name() == _MATMUL:
            seen[context.is_recompute] += 1
            second = seen[context.is_recompute] % 2 == 0
        kept = op.name() in _KEPT and not second
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)
