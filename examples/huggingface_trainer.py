"""transformers' Trainer with one callback: predictions and readings among its own logs.

    python examples/huggingface_trainer.py

The step is priced from the first samples when training begins; evaluation and saving are left out of
tokens/s and MFU.
"""

from __future__ import annotations

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from preflop.integrations.transformers import PreflopCallback

STEPS, SEQUENCE, VOCAB = 12, 32, 64


class Counting(torch.utils.data.Dataset):
    """Sequences in which the next token is one more."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (index + torch.arange(SEQUENCE)) % VOCAB
        return {"input_ids": ids, "labels": ids}


def main() -> list[dict[str, float]]:
    """Train; print what the trainer logged."""
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_positions=SEQUENCE, n_embd=64, n_layer=2, n_head=4)
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=STEPS, per_device_train_batch_size=4, gradient_accumulation_steps=2,
            learning_rate=1e-2, logging_steps=4, eval_strategy="steps", eval_steps=6, save_steps=6,
            report_to=[], use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(
            model=model, args=arguments, train_dataset=Counting(), eval_dataset=Counting(),
            callbacks=[PreflopCallback(device="h100-sxm")],
        )  # fmt: skip
        trainer.train()
    for row in trainer.state.log_history:
        if "loss" in row:
            print({name: value for name, value in row.items() if name == "loss" or "preflop" in name})
    return trainer.state.log_history


if __name__ == "__main__":
    main()
