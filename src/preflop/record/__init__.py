"""Recording: one training step run on fake tensors and written to a tape.

May import: torch, tape, subject, ops names, units, errors.
Does not belong here: counting (ledgers), anything about a device's speed (timing).
"""
