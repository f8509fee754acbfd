"""The reference trainer: data, loop, schedule, checkpoints. Each part is one screen.

May import: record, models, measure, accounting, report, and what they stand on. torch is needed.
Does not belong here: prices of a step (`preflop.account`), and how tables look elsewhere (report).
"""
