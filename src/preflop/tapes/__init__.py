"""Tapes that ship with the package: the named models, recorded, folded and parametric.

May import: tape, transforms, models.catalog, hardware, precision, errors; `build.py` alone, which makes
them, imports torch. Does not belong here: counting (ledgers).

`python -m preflop.tapes.build` records all of them anew.
"""
