"""The naive loop, priced before it runs and measured while it does.

    python examples/naive_loop.py

Everything in fp32, one batch a step, no clipping, no schedule: what a first draft looks like. Preflop
asks nothing of it: an account of the model and batch, and one call of the meter per step.
"""

from __future__ import annotations

import torch
from torch import nn

import preflop

STEPS, BATCH, SEQUENCE, VOCAB, WIDTH = 12, 8, 32, 64, 64


class NextToken(nn.Module):
    """Embedding, one transformer block, and a score for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean loss of the labels."""
        future = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        scores = self.head(self.block(self.embedding(ids), src_mask=future, is_causal=True))
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def batches() -> list[torch.Tensor]:
    """Counting, from random starts: the next token is one more."""
    starts = torch.randint(VOCAB, (STEPS, BATCH, 1), generator=torch.Generator().manual_seed(0))
    return list((starts + torch.arange(SEQUENCE + 1)) % VOCAB)


def main() -> list[float]:
    """Train; print what was predicted and what was measured."""
    torch.manual_seed(0)
    model = NextToken()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = batches()

    account = preflop.account(model, (data[0][:, :-1], data[0][:, 1:]))
    print(f"a step peaks at {account.memory.peak_bytes:,} bytes and does {account.flops.model:,} FLOPs")
    meter = preflop.Meter(account)
    meter.start()

    losses = []
    for tokens in data:
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        meter.step()

    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(meter.reading())
    return losses


if __name__ == "__main__":
    main()
