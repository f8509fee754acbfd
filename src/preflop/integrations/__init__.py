"""Callbacks that price and measure a step inside other trainers. One file per host, a screen each.

May import: measure, accounting, record. Each file imports its host when it is imported, and only it does.
Does not belong here: a second meter or account; these pass the host's moments on.
"""
