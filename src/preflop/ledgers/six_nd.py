"""Why the counted model FLOPs differ from 6 x parameters x tokens.

The rule gives each parameter one multiply-add per token in forward and two in backward. Here every
matmul-like call is assigned to the parameters it multiplies, found by following a parameter through
casts and copies; what is left over is attention and work between activations. The differences are
counted from the tape and sum to `model - 6ND` exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from preflop.account import Difference
from preflop.ledgers.tally import used_outputs
from preflop.ops.collective import COPY_IN, COPY_OUT, REDUCE_SCATTER
from preflop.ops.fp8 import CASTS
from preflop.ops.pricing import work
from preflop.ops.registry import Kind, Work
from preflop.tape.events import Call, ParameterInfo, Phase, Role, Signature, Tape

# A tensor made by one of these from a weight is still that weight; by one of these from which a weight
# gradient is made, is still that gradient.
_SAME_VALUE = frozenset(
    f"aten.{name}"
    for name in (
        "_to_copy", "clone", "contiguous", "t", "transpose", "permute", "view", "reshape", "_unsafe_view",
        "expand", "copy_", "detach", "alias", "cat", "stack", "mul", "div", "mul_", "div_",
    )
)  # fmt: skip
_ADDED = frozenset({"aten.add", "aten.add_"})
_GRADIENT_STILL = _SAME_VALUE | _ADDED | {COPY_IN, REDUCE_SCATTER}
# A weight that is broadcast over the batch: its gradient is a batched product, summed.
_SUMMED = frozenset({"aten.sum"})


def six_nd(tape: Tape) -> int | None:
    """6 x parameters x tokens of the step (all microbatches); None where there are no tokens."""
    tokens = step_tokens(tape)
    return None if tokens is None else 6 * _elements(tape.parameters) * tokens


def step_tokens(tape: Tape) -> int | None:
    """Tokens that one optimizer step sees: of all microbatches."""
    subject = tape.subject
    if subject is None or subject.tokens is None:
        return None
    return subject.tokens * subject.microbatches


@dataclass
class _Tally:
    """FLOPs of the steady step by what they multiply."""

    attention: int = 0
    """Fused attention, forward and backward."""
    activations: int = 0
    """Matmul-like calls none of whose operands is a weight, nor their result a weight's gradient."""
    forward: dict[int, int] = field(default_factory=dict)
    """Parameter's storage -> forward FLOPs that multiply it."""
    input_gradient: dict[int, int] = field(default_factory=dict)
    """Parameter's storage -> backward FLOPs that multiply it."""
    weight_gradient: int = 0


def differences(tape: Tape, model_flops: int) -> tuple[Difference, ...]:
    """Each reason with its FLOPs, largest first; the sum is `model_flops` - 6ND.

    Args:
        model_flops: as `flops_totals` counts them.
    """
    tokens = step_tokens(tape)
    rule = six_nd(tape)
    if tokens is None or rule is None or not tape.parameters:
        return ()
    tally = _tally(tape)
    found = [
        Difference(tally.attention, "fused attention: its scores and weighted sums multiply no parameter"),
        Difference(
            tally.activations, "matmuls between activations (attention's scores): no parameter in them"
        ),
        *_not_multiplied(tape, tally, tokens),
        *_positions(tape, tally, tokens),
        *_missing_gradients(tape, tally),
    ]
    rest = model_flops - rule - sum(difference.flops for difference in found)
    found.append(Difference(rest, "matmuls outside forward and backward"))
    kept = [difference for difference in found if difference.flops]
    return tuple(sorted(kept, key=lambda difference: -abs(difference.flops)))


def _tally(tape: Tape) -> _Tally:
    calls = tape.steady()
    weights = _weight_storages(tape, calls)
    gradients = _gradient_storages(tape, calls, weights)
    tally = _Tally()
    for call, part in _matmul_like(tape, calls):
        if part.kind is Kind.ATTENTION:
            tally.attention += part.flops
        else:
            _assign(tape, tally, call, part.flops, weights, gradients)
    return tally


def _matmul_like(tape: Tape, calls: list[Call]) -> Iterator[tuple[Call, Work]]:
    """Calls of forward and backward with each part of their work that counts towards model FLOPs."""
    used = used_outputs(tape)
    prices: dict[int, tuple[Work, ...]] = {}
    for position, call in enumerate(calls):
        if call.phase not in (Phase.FORWARD, Phase.BACKWARD):
            continue
        if position in used:
            parts = _parts(work(tape.signatures[call.signature], used[position]))
        elif call.signature in prices:
            parts = prices[call.signature]
        else:
            parts = prices[call.signature] = _parts(work(tape.signatures[call.signature]))
        for part in parts:
            yield call, part


def _parts(price: Work | None) -> tuple[Work, ...]:
    if price is None:
        return ()
    return tuple(part for part in price.parts or (price,) if part.kind is not Kind.OTHER)


def _assign(
    tape: Tape, tally: _Tally, call: Call, flops: int, weights: dict[int, int], gradients: set[int]
) -> None:
    inputs = len(tape.signatures[call.signature].inputs)
    operands = list(dict.fromkeys(weights[s] for s in call.storages[:inputs] if s in weights))
    makes_gradient = any(storage in gradients for storage in call.storages[inputs:])
    if call.phase is Phase.FORWARD and operands:
        _spread(tally.forward, operands, flops, tape)
    elif call.phase is Phase.BACKWARD and makes_gradient and operands:
        # One call makes both gradients (convolution, LSTM): count it half and half.
        _spread(tally.input_gradient, operands, flops // 2, tape)
        tally.weight_gradient += flops - flops // 2
    elif call.phase is Phase.BACKWARD and makes_gradient:
        tally.weight_gradient += flops
    elif call.phase is Phase.BACKWARD and operands:
        _spread(tally.input_gradient, operands, flops, tape)
    else:
        tally.activations += flops


def _spread(sums: dict[int, int], storages: list[int], flops: int, tape: Tape) -> None:
    """Give a call's FLOPs to the weights it multiplies, in proportion to their size."""
    matrices = [s for s in storages if len(tape.storages[s].shape) > 1] or storages
    total = sum(tape.storages[s].elements for s in matrices) or 1
    left = flops
    for storage in matrices[1:]:
        share = flops * tape.storages[storage].elements // total
        sums[storage] = sums.get(storage, 0) + share
        left -= share
    sums[matrices[0]] = sums.get(matrices[0], 0) + left


def _weight_storages(tape: Tape, calls: Iterable[Call]) -> dict[int, int]:
    """Storage -> the parameter's storage that it is, or is a cast or copy of, or what a rank gathered of it."""
    weights = {parameter.storage: parameter.storage for parameter in tape.parameters}
    gathered: dict[int, tuple[int | None, ...]] = {}
    followed = [sig.op in _SAME_VALUE or sig.op in CASTS or sig.op in (COPY_IN, COPY_OUT) for sig in tape.signatures]
    for call in calls:
        if not followed[call.signature]:
            continue
        signature = tape.signatures[call.signature]
        if signature.op in (COPY_IN, COPY_OUT):
            _follow_gathering(call, signature, weights, gathered)
            continue
        inputs = call.storages[: 1 if signature.op in CASTS else len(signature.inputs)]  # not its scale and history
        sources = set(map(weights.get, inputs))
        if len(sources) == 1 and (source := sources.pop()) is not None:
            for storage in call.storages[len(signature.inputs) :]:
                weights.setdefault(storage, source)
    return weights


def _follow_gathering(
    call: Call, signature: Signature, weights: dict[int, int], gathered: dict[int, tuple[int | None, ...]]
) -> None:
    """Shards are copied side by side into a buffer, gathered in it, and copied out in the same order."""
    count = len(signature.inputs)
    buffer, results = call.storages[0], call.storages[count:]
    if signature.op == COPY_IN:
        gathered[results[0]] = tuple(weights.get(storage) for storage in call.storages[:count])
        return
    for storage, weight in zip(results, gathered.get(buffer, ())):
        if weight is not None:
            weights.setdefault(storage, weight)


def _gradient_storages(tape: Tape, calls: list[Call], weights: dict[int, int]) -> set[int]:
    """Storages that are a parameter's gradient, or are cast, copied or added into one."""
    gradients = {i for i, storage in enumerate(tape.storages) if storage.role is Role.GRADIENT}
    followed = [sig.op in _GRADIENT_STILL or sig.op in _SUMMED for sig in tape.signatures]
    for call in reversed(calls):
        if call.phase is not Phase.BACKWARD or not followed[call.signature]:
            continue
        signature = tape.signatures[call.signature]
        inputs = call.storages[: len(signature.inputs)]
        if signature.op in _SUMMED and not all(_is_product(tape, storage) for storage in inputs):
            continue
        written = [inputs[i] for i in signature.writes]
        if not gradients.isdisjoint(call.storages[len(inputs) :]) or not gradients.isdisjoint(written):
            gradients.update(set(inputs).difference(weights))
    return gradients


def _is_product(tape: Tape, storage: int) -> bool:
    maker = tape.storages[storage].call
    return maker >= 0 and tape.signatures[tape.calls[maker].signature].op in ("aten.bmm", "aten.mm")


def _not_multiplied(tape: Tape, tally: _Tally, tokens: int) -> Iterable[Difference]:
    """Parameters that no matmul multiplies: the rule counts them, the step does not."""
    idle = [p for p in tape.parameters if p.storage not in tally.forward]
    looked_up = [p for p in idle if "Embedding" in p.module_type]
    rest = [p for p in idle if "Embedding" not in p.module_type]
    unused = [p for p in rest if len(p.shape) > 1]
    small = [p for p in rest if len(p.shape) <= 1]
    for group, why in (
        (looked_up, "embeddings that are looked up and not multiplied"),
        (small, "norm scales and biases, which no matmul multiplies"),
        (unused, "parameters that no matmul of this step uses (positions, inactive experts, unused)"),
    ):
        count = _elements(group)
        if count:
            yield Difference(-6 * count * tokens, f"{why} ({count:,} parameters)")


def _positions(tape: Tape, tally: _Tally, tokens: int) -> Iterable[Difference]:
    """Weights that meet more or fewer positions than there are tokens."""
    more = fewer = 0
    for parameter in _by_storage(tape.parameters).values():
        size = _elements(parameter)
        used = tally.forward.get(parameter[0].storage)
        if used is None:
            continue
        over = 3 * (used - 2 * size * tokens)
        more, fewer = (more + over, fewer) if over > 0 else (more, fewer + over)
    yield Difference(more, "weights used at more positions than there are tokens (shared or convolved)")
    yield Difference(fewer, "weights used at fewer positions than there are tokens (experts, pooled heads)")


def _missing_gradients(tape: Tape, tally: _Tally) -> Iterable[Difference]:
    """Backward work that the rule expects of the multiplied weights and that the step does not do."""
    frozen = {p.storage for p in tape.parameters if not p.trainable}
    forward = sum(tally.forward.values())
    frozen_forward = sum(flops for storage, flops in tally.forward.items() if storage in frozen)
    extra_weight = tally.weight_gradient - (forward - frozen_forward)
    missing = {s: tally.input_gradient.get(s, 0) - flops for s, flops in tally.forward.items()}
    none = sum(lack for s, lack in missing.items() if s not in tally.input_gradient)
    partly = sum(lack for s, lack in missing.items() if s in tally.input_gradient)
    strangers = sum(f for s, f in tally.input_gradient.items() if s not in tally.forward)
    yield Difference(-frozen_forward, "frozen parameters have no weight gradient")
    yield Difference(none, "first layers and those below frozen ones need no input gradient")
    yield Difference(
        extra_weight + partly + strangers, "weight and input gradients that cost other than their forward"
    )


def _by_storage(parameters: Iterable[ParameterInfo]) -> dict[int, list[ParameterInfo]]:
    groups: dict[int, list[ParameterInfo]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.storage, []).append(parameter)
    return groups


def _elements(parameters: Iterable[ParameterInfo]) -> int:
    total = 0
    for parameter in parameters:
        count = 1
        for size in parameter.shape:
            count *= size
        total += count
    return total
