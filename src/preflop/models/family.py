"""Members of a model's family: the named ones, and those of any depth and width. No torch."""

from __future__ import annotations

import dataclasses
from math import gcd, lcm

from preflop.errors import BadSubject
from preflop.models.catalog import ModelFacts, models


def members(facts: ModelFacts, seq: int | None) -> tuple[ModelFacts, ...]:
    """The named models of the family that take so long a sequence, by parameters.

    >>> from preflop.models.catalog import find
    >>> [member.name for member in members(find("gpt2"), 1024)]
    ['gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl']
    """
    found = [
        other
        for other in models()
        if other.family == facts.family and (seq is None or seq <= (other.max_positions or seq))
    ]
    return tuple(sorted(found, key=lambda other: other.parameters))


def with_layers(facts: ModelFacts, layers: int) -> ModelFacts:
    """The member of so many blocks.

    Raises:
        BadSubject: its blocks are not of one kind.
    """
    if not facts.equal_blocks:
        raise BadSubject(
            f"{facts.name} is built in stages of blocks that differ, so that it has no depth to search.\n"
            "  Ask for --what batch or member."
        )
    return dataclasses.replace(facts, layers=layers, name=f"{facts.name}, {layers} blocks")


def head_step(facts: ModelFacts) -> int:
    """Heads between two members that differ in width alone: the least that keeps every ratio whole.

    >>> from preflop.models.catalog import find
    >>> head_step(find("gpt2")), head_step(find("llama-3-8b"))
    (1, 4)

    Raises:
        BadSubject: the model has no heads.
    """
    heads = facts.needed("heads")
    return lcm(*(heads // gcd(heads, size) for size in (facts.hidden, facts.kv_heads or heads)))


def with_heads(facts: ModelFacts, heads: int) -> ModelFacts:
    """The member of so many heads of the same width each: hidden size and key-value heads in proportion,
    the feed-forward's width too, to the nearest multiple of a head's.

    >>> from preflop.models.catalog import find
    >>> wider = with_heads(find("llama-3-8b"), 40)
    >>> wider.hidden, wider.kv_heads, wider.ffn
    (5120, 10, 17920)
    """
    before = facts.needed("heads")
    hidden = facts.hidden * heads // before
    unit = facts.head_dim or facts.hidden // before
    ffn = None if facts.ffn is None else max(unit, round(facts.ffn * heads / before / unit) * unit)
    return dataclasses.replace(
        facts,
        name=f"{facts.name}, hidden size {hidden}",
        hidden=hidden,
        heads=heads,
        kv_heads=None if facts.kv_heads is None else facts.kv_heads * heads // before,
        ffn=ffn,
    )
