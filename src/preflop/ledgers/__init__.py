"""Ledgers: sums over a tape. Each is a pure function of it: memory, FLOPs, traffic, copies, 6ND.

May import: tape, ops, account (its dataclasses), units, errors. Never torch, never a device.
Does not belong here: what one operator does (ops), seconds (timing), text (report).
"""
