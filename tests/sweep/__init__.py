"""The sweep: every architecture that transformers' auto classes know, small, priced and measured.

`python -m tests.sweep.run` runs it (see `run.py`); `docs/coverage.md` is written from what it found.
"""
