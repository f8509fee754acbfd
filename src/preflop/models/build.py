"""A named model as a module, and a batch that it can run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from preflop.errors import BadNumber, BadSubject
from preflop.models.bert import Bert
from preflop.models.catalog import Architecture, ModelFacts, find
from preflop.models.gpt2 import GPT2
from preflop.models.llama import Llama
from preflop.models.neox import NeoX
from preflop.models.resnet import ResNet
from preflop.models.vit import ViT

_MODULES: dict[Architecture, type[nn.Module]] = {
    Architecture.GPT2: GPT2,
    Architecture.LLAMA: Llama,
    Architecture.NEOX: NeoX,
    Architecture.BERT: Bert,
    Architecture.VIT: ViT,
    Architecture.RESNET: ResNet,
}

# Seed of the example batch's random numbers; any would do, a fixed one repeats.
_BATCH_SEED = 0


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """New floating-point tensors are of `dtype` inside, as before outside."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build(
    name_or_facts: str | ModelFacts,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> nn.Module:
    """The model as a module in training mode, with parameters of `dtype`. Its weights have no values yet.

    Weights are memory as `torch.empty` gives it, so that a model of any size is built in seconds under
    a fake mode or on the meta device, without touching the random state. Call
    `preflop.models.initialise.initialise` before running it for real.

    >>> sum(parameter.numel() for parameter in build("gpt2", device="meta").parameters())
    124439808

    Args:
        name_or_facts: a name or alias of `preflop models`, or facts.
        dtype: of parameters and floating-point buffers; None: torch's default.
        device: None: torch's default.

    Raises:
        UnknownModel: no such name.
    """
    facts = find(name_or_facts) if isinstance(name_or_facts, str) else name_or_facts
    with _default_dtype(dtype), torch.device(device) if device is not None else nullcontext():
        return _MODULES[facts.architecture](facts)


def block_path(facts: ModelFacts) -> str:
    """Name, within the module, of the ModuleList that holds the repeated blocks.

    >>> block_path(find("llama-3-8b"))
    'blocks'
    """
    return "blocks"


def example_batch(
    facts: ModelFacts,
    batch_size: int,
    sequence_length: int | None,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """Keyword arguments of one forward with labels: what one microbatch on one device holds.

    Token models: `input_ids` and `labels`, int64 (batch_size, sequence_length), two tensors as a data
    loader makes them. Image models: `images`, fp32, and `labels`, int64 (batch_size,). Values are random
    and repeat; the global random state is not touched.

    >>> {name: tuple(tensor.shape) for name, tensor in example_batch(find("gpt2"), 2, 8).items()}
    {'input_ids': (2, 8), 'labels': (2, 8)}

    Raises:
        BadNumber: a size that is not a positive integer.
        BadSubject: a length for an image model, none for a token model, or one past its positions.
    """
    _require_positive("batch size", batch_size)
    if facts.is_image:
        return _image_batch(facts, batch_size, sequence_length, device)
    length = _checked_length(facts, sequence_length)
    shape = (batch_size, length)
    generator = torch.Generator().manual_seed(_BATCH_SEED)
    return {
        name: torch.randint(facts.vocab, shape, generator=generator, device="cpu").to(device)
        for name in ("input_ids", "labels")
    }


def _image_batch(
    facts: ModelFacts, batch_size: int, sequence_length: int | None, device: torch.device | str
) -> dict[str, Tensor]:
    if sequence_length is not None:
        raise BadSubject(
            f"{facts.name} reads images, and got a sequence length of {sequence_length}.\n"
            f"  It needs a batch size only (images are {facts.image_size} x {facts.image_size}).\n"
            "  Leave the sequence length (--seq) out."
        )
    shape = (batch_size, facts.channels, facts.image_size, facts.image_size)
    generator = torch.Generator().manual_seed(_BATCH_SEED)
    images = torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")
    labels = torch.randint(facts.classes, (batch_size,), generator=generator, device="cpu")
    return {"images": images.to(device), "labels": labels.to(device)}


def _checked_length(facts: ModelFacts, sequence_length: int | None) -> int:
    """The sequence length, if the model has that many positions."""
    if sequence_length is None:
        raise BadSubject(
            f"{facts.name} reads tokens, and got no sequence length.\n"
            f"  It needs one, at most {facts.max_positions}.\n"
            "  Give it with --seq (sequence_length in Python)."
        )
    _require_positive("sequence length", sequence_length)
    if facts.max_positions is not None and sequence_length > facts.max_positions:
        raise BadSubject(
            f"{facts.name} has {facts.max_positions} positions, and got a sequence length of "
            f"{sequence_length}.\n"
            f"  Use at most {facts.max_positions}, or another model: `preflop models`."
        )
    return sequence_length


def _require_positive(what: str, value: object) -> None:
    """Raises BadNumber unless the value is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadNumber(f"the {what} is {value!r}; it must be an integer of at least 1.")
