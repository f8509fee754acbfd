"""Measuring: what a step really takes here, so that a prediction has a truth to meet.

May import: torch, subject, record, tape, ledgers, account, hardware, timing, units, errors.
Does not belong here: predicting (record and the ledgers), showing (report).
"""
