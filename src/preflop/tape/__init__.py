"""The tape: what one recorded training step did, as plain data.

May import: units, errors. Never torch.
Does not belong here: recording (record), counting (ledgers), changing (transforms).
"""
