"""Models: Preflop's own reference models in plain PyTorch, and the facts they are built from.

May import: units, errors; every file but `catalog.py` imports torch, so import those where needed.
Does not belong here: anything that counts, prices or records a model; weights; tokenizers.
"""
