"""What ONE operator does, by family: its FLOPs, the bytes it moves, the memory it takes inside.

May import: tape, units, errors. Never torch, never a device.
Does not belong here: sums over a tape (ledgers), time (timing).
"""
