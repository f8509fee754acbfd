"""Formulas: one function is one published equation, with its source, its units and an example.

May import: quantity, units, errors. Never torch, a tape or a device.
Does not belong here: what is counted from a recorded step (ledgers), figures of devices (hardware).
"""
