"""Published rows: runs that others measured, held against what Preflop says of them.

May import: every room; nothing imports it but the command line and the package's own tests.
Does not belong here: a rule or a constant. Rows judge; a number that was fitted to one would judge itself.
"""
