"""What all tests share. No torch here: most tests run without it."""

from __future__ import annotations

import os

from hypothesis import settings

# A slow machine is no failure; and what CI says should not depend on chance.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")

# Pictures are drawn to files, never to a window.
os.environ.setdefault("MPLBACKEND", "Agg")

# Whether this machine was calibrated is no business of the tests: those that need it say so.
os.environ.setdefault("PREFLOP_CALIBRATION", os.path.join(os.path.dirname(__file__), "not-calibrated.toml"))

# Workers of `pytest -n` share the cores; with a pool of threads each they would wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
