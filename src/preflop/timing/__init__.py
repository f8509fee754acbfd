"""Timing: where counts meet a device.

May import: account (its dataclasses), ledgers, formulas, hardware, units, errors. Never torch.
Does not belong here: what an operator does (ops), sums over a tape (ledgers), figures of devices
(hardware).
"""
