"""Plans: searches over what a step costs, for what fits and what is fastest.

May import: every room to the left of it (formulas, hardware, timing, account). Never torch.
Does not belong here: recording (it is passed in as a function), showing (report).
"""
