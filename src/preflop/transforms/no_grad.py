"""What forward calls are without gradients, where that is not what they are with them.

Where an operator writes into a tensor whose old values backward needs, autograd copies it first
(`original_self` in tools/autograd/gen_variable_type.py): without gradients it does not.

CUDA's attention is asked for the logarithm of the softmax's denominator only where backward will read it
(`compute_log_sumexp`, which torch sets to whether an input needs a gradient: `scaled_dot_product_attention` in
aten/src/ATen/native/transformers/attention.cpp). The flash kernel makes it always.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from preflop.tape.events import Signature, Tape, TensorMeta

_EFFICIENT = "aten._scaled_dot_product_efficient_attention"
_CUDNN = "aten._scaled_dot_product_cudnn_attention"
_ASKED = 4
"""Place of `compute_log_sumexp` among the arguments of both."""


def without_gradients(signature: Signature) -> Signature:
    """The call that torch makes in its place under torch.no_grad; itself where it makes the same."""
    if signature.op not in (_EFFICIENT, _CUDNN) or not signature.args[_ASKED]:
        return signature
    args = (*signature.args[:_ASKED], False, *signature.args[_ASKED + 1 :])
    outputs = signature.outputs
    if signature.op == _EFFICIENT:
        outputs = (outputs[0], _empty_rows(outputs[1]), *outputs[2:])
    return dataclasses.replace(signature, args=args, outputs=outputs)


def copies_for_backward(tape: Tape, calls: Sequence[int]) -> dict[int, int]:
    """Among forward calls in order, those that copy a tensor for backward alone, each with its copy: the next
    call writes into the tensor, and no call reads the copy."""
    read = {
        storage
        for index in calls
        for storage in tape.calls[index].storages[: len(tape.signatures[tape.calls[index].signature].inputs)]
    }
    found = {}
    for index, following in zip(calls, calls[1:]):
        call, after = tape.calls[index], tape.calls[following]
        if tape.signatures[call.signature].op != "aten.clone" or call.source != after.source:
            continue
        written = [after.storages[place] for place in tape.signatures[after.signature].writes]
        if call.storages[0] in written and call.storages[-1] not in read:
            found[index] = call.storages[-1]
    return found


def _empty_rows(made: TensorMeta) -> TensorMeta:
    """(batch, heads, 0) for (batch, heads, queries). Sizes may be symbols: zero is what the offset is, and one
    what the last stride is."""
    zero, one = made.offset, made.stride[-1]
    return dataclasses.replace(
        made, shape=(*made.shape[:2], zero), stride=(made.shape[1], one, one)
    )
