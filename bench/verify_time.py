"""`preflop verify --time` on nine models: GPT-2-like, ResNet-like and LSTM, three sizes each.

    python bench/verify_time.py        # after `preflop calibrate`; a minute on an idle machine

It prints a line per model, and how many are within the tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from preflop.measure.step_time import verify_step_time
from preflop.subject import Subject, resolve


class Residual(nn.Module):
    """ResNet's basic block."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, C, H, W) to the same."""
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(x + self.norm2(self.conv2(y)))


def resnet(channels: int, blocks: int) -> nn.Module:
    """A stem, blocks of one width, a classifier over ten classes."""
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1), *[Residual(channels) for _ in range(blocks)],
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10),
    )  # fmt: skip


class Language(nn.Module):
    """A word-level LSTM language model."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(B, S) to (B, vocabulary, S)."""
        out: torch.Tensor = self.head(self.lstm(self.embed(ids))[0])
        return out.transpose(1, 2)


def subjects() -> Iterator[tuple[str, Subject]]:
    """The nine."""
    entropy = nn.functional.cross_entropy
    for name, batch, seq in (("gpt2-nano", 4, 64), ("gpt2-nano", 16, 64), ("gpt2", 1, 128)):
        yield f"{name} {batch} x {seq}", resolve(name, {"batch_size": batch, "sequence_length": seq})
    for channels, blocks, batch, side in ((16, 3, 8, 32), (32, 4, 8, 32), (64, 4, 8, 56)):
        x, y = torch.randn(batch, 3, side, side), torch.randint(10, (batch,))
        yield (
            f"ResNet {channels} x {blocks}, {batch} x {side}^2",
            resolve(resnet(channels, blocks), (x,), loss=lambda out, y=y: entropy(out, y)),
        )
    for width, layers, batch, seq in ((64, 1, 8, 32), (128, 2, 16, 64), (256, 2, 16, 64)):
        ids = torch.randint(1000, (batch, seq))
        yield (
            f"LSTM {width} x {layers}, {batch} x {seq}",
            resolve(
                Language(1000, width, layers), (ids,), loss=lambda out, y=ids: entropy(out, y), device="cpu"
            ),
        )


def main() -> None:
    """Prints a line per model, and how many are within the tolerance."""
    good = 0
    for name, subject in subjects():
        found = verify_step_time(subject)
        good += found.verifies
        print(
            f"{name:28} predicted {found.predicted_s * 1e3:8.2f} ms, at the speed now "
            f"{found.predicted_now_s * 1e3:8.2f} ms, measured {found.measured_s * 1e3:8.2f} ms  {found.error:+6.1%}",
            flush=True,
        )
    print(f"{good} of 9 within 20 %")


if __name__ == "__main__":
    main()
