"""Preflop prices a PyTorch training run before it happens."""
