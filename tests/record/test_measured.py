"""What depends on values, held to real steps: the predicted peaks are those that torch's allocator saw."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import preflop


class Packed(nn.Module):
    """A recurrent layer over sequences of unlike lengths."""

    def __init__(self, kind):
        super().__init__()
        self.r = kind(64, 128, 2, batch_first=True)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.r(packed)[0], batch_first=True)[0]


class Masked(nn.Module):
    """Writes, reads and selects by a boolean mask."""

    def __init__(self):
        super().__init__()
        self.l, self.empty = nn.Linear(64, 256), nn.Parameter(torch.zeros(256))

    def forward(self, x, mask):
        h = self.l(x).clone()
        h[~mask] = self.empty
        return h[mask].pow(2).sum() + h.masked_select(mask[..., None]).sum()


class Ctc(nn.Module):
    """CTC over known lengths."""

    def __init__(self):
        super().__init__()
        self.l = nn.Linear(64, 100)

    def forward(self, x, targets, lengths, target_lengths):
        return F.ctc_loss(self.l(x).log_softmax(-1), targets, lengths, target_lengths)


class CtcBatchFirst(Ctc):
    """As speech models do it: the batch first, transposed for the loss, so softmax's gradient is not dense."""

    def forward(self, x, targets, lengths, target_lengths):
        return F.ctc_loss(self.l(x).log_softmax(-1).transpose(0, 1), targets, lengths, target_lengths)


class SoftmaxOfTransposed(nn.Module):
    """Softmax of what lies otherwise in memory than it reads: the kernels copy first."""

    def forward(self, x):
        return (x.transpose(1, 2).softmax(-1) * x.transpose(1, 2)).sum()


class Slices(nn.Module):
    """Writes into slices of one buffer."""

    def __init__(self):
        super().__init__()
        self.l = nn.Linear(64, 64)

    def forward(self, x):
        out = x.new_zeros(x.shape[0], 128)
        out[:, :64] = self.l(x)
        out[:, 64:].add_(self.l(x)).mul_(2)
        return out.sum()


class Fourier(nn.Module):
    """A filter in the frequency domain."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(129, dtype=torch.complex64))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x) * self.w, n=256)


LENGTHS = torch.tensor([50, 20, 33, 50])
CASES = {
    "packed LSTM": lambda: (Packed(nn.LSTM), (torch.randn(4, 50, 64), LENGTHS)),
    "packed GRU": lambda: (Packed(nn.GRU), (torch.randn(4, 50, 64), LENGTHS)),
    "boolean mask": lambda: (Masked(), (torch.randn(32, 64, 64), torch.rand(32, 64) > 0.3)),
    "CTC": lambda: (
        Ctc(),
        (torch.randn(60, 8, 64), torch.randint(1, 100, (8, 20)), torch.full((8,), 60), torch.full((8,), 20)),
    ),
    "CTC, batch first": lambda: (
        CtcBatchFirst(),
        (torch.randn(8, 60, 64), torch.randint(1, 100, (8, 20)), torch.full((8,), 60), torch.full((8,), 20)),
    ),
    "softmax of a transpose": lambda: (
        nn.Sequential(nn.Linear(64, 64), SoftmaxOfTransposed()), torch.randn(8, 60, 64),
    ),
    "embedding bag": lambda: (
        nn.EmbeddingBag(5000, 64, mode="max"),
        (torch.randint(0, 5000, (1000,)), torch.arange(0, 1000, 10)),
    ),
    "slices": lambda: (Slices(), torch.randn(256, 64)),
    "Fourier": lambda: (Fourier(), torch.randn(256, 256)),
    "normalised weights": lambda: (
        nn.Sequential(
            parametrizations.weight_norm(nn.Linear(256, 256)),
            parametrizations.spectral_norm(nn.Linear(256, 256)),
        ),
        torch.randn(64, 256),
    ),
    "lazy": lambda: (nn.Sequential(nn.LazyLinear(512), nn.ReLU(), nn.LazyLinear(16)), torch.randn(64, 256)),
    "nothing to train": lambda: (nn.Sequential(nn.Tanh(), nn.Flatten()), torch.randn(64, 256)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_predicted_is_measured(name):
    """Both peaks within 0.1 % of a real step's."""
    torch.manual_seed(0)
    model, batch = CASES[name]()
    found = preflop.verify(model, batch)
    assert found.memory_verifies, (found.steady, found.first, found.phases)
