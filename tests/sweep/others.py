"""Subjects beside transformers' auto mappings: peft's adapters, torch's own layers, odd modules."""

from __future__ import annotations

from typing import Any


def other_pairs() -> list[Any]:
    return []
