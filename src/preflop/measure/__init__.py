"""[torch] What a real run on this machine did: its memory, its operators, its speed.

May import: record, accounting and everything left of them.
Does not belong here: predictions; what a figure means is said where it is predicted.
"""
