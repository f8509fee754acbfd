"""The loop as it should be: autocast, accumulation weighted by tokens, clipping, scaler, schedule.

    python examples/amp_loop.py

The order matters, and each line has a reason: autocast is opened for each forward and closed before
backward (it caches cast weights); the loss is summed in fp32 and divided by the tokens of the *whole*
step; gradients are unscaled before they are clipped; the schedule moves only when a step was taken.
"""

from __future__ import annotations

import torch
from naive_loop import NextToken, batches
from torch import nn

import preflop

MICROBATCHES = 4


def main(dtype: torch.dtype = torch.bfloat16) -> list[float]:
    """Train; print what was predicted and what was measured."""
    torch.manual_seed(0)
    model = NextToken()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda taken: min(1.0, (taken + 1) / 3))
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)  # bf16 has fp32's range
    data = batches()

    first = data[0].tensor_split(MICROBATCHES)[0]
    account = preflop.account(
        model,
        (first[:, :-1], first[:, 1:]),
        precision="fp16-mixed" if scaler.is_enabled() else "bf16-mixed",
        microbatches=MICROBATCHES,
    )
    print(f"a step peaks at {account.memory.peak_bytes:,} bytes and does {account.flops.model:,} FLOPs")
    meter = preflop.Meter(account)
    meter.start()

    losses = []
    for tokens in data:
        whole = tokens[:, 1:].numel()
        total = 0.0
        for part in tokens.tensor_split(MICROBATCHES):
            with torch.autocast("cpu", dtype=dtype):
                mean = model(part[:, :-1], part[:, 1:])
            loss = mean.float() * part[:, 1:].numel() / whole
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if torch.isfinite(norm):
            scaler.step(optimizer)
            schedule.step()
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
        meter.step()

    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(meter.reading())
    return losses


if __name__ == "__main__":
    main()
