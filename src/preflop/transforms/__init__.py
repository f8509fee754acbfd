"""Transforms: functions Tape -> Tape. Other depth, other sizes, other accumulation, from one recording.

May import: tape, ops, units, errors. Never torch.
Does not belong here: totals (ledgers), recording (record). The law, tested wherever both sides can run:
transform(record(s)) == record(transformed s).
"""
