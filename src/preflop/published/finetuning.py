"""Rows of litgpt's fine-tuning tables: one GPU, LoRA or adapters, bf16 or 4-bit weights (`litgpt.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from preflop.published.plan import Plan, device_of
from preflop.published.rows import CannotBuild, Row
from preflop.subject import resolve

if TYPE_CHECKING:
    from preflop.published.litgpt import Shape

# Trained parameters of one block with an adapter: its prompt and one gate per head; v2 has several times that.
_V2_AT_LEAST = 2


def litgpt_plan(row: Row) -> Plan:
    """litgpt's own model and loop.

    The resource tables' peak is the first microbatch's, which has the data's longest sample; config_hub's loop holds
    the logits of one microbatch into the next, taken as equally long (both of the length that the row gives). So
    the padding that its collectors doubt is settled, where the row prints the model's dimensions.
    """
    import torch

    from preflop.published.litgpt import LanguageModel, Loop

    if "fsdp" in row.text("sharding").casefold():
        raise CannotBuild("FSDP's gathered layers in flight, and rank 0's loading, are not built")
    shape = _shape(row)
    batch = row.needed("micro_batch")
    device, _ = device_of(row)
    ids = torch.zeros(batch, shape.length, dtype=torch.int64)
    hub = "config_hub" in row.source
    loop = Loop(ids, holds=hub)
    subject = resolve(
        lambda: LanguageModel(shape), ids, loss=loop.loss, optimizer="adamw" if hub else None, precision="fp32",
        device=device.id if device else "a100-sxm4-40gb", keep_output=True,
    )  # fmt: skip
    return Plan(
        key=("litgpt", shape, batch, hub, device.compute_capability if device else None), subject=subject, device=None,
        no_time="samples have other lengths than the longest, which alone is published",
        settled=bool(row.whole("layers")),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Family:
    """What decides the operators of a model besides its dimensions."""

    gated: bool
    parallel: bool
    shared_norm: bool = False
    bias: bool = False
    head_bias: bool = False
    rotary: float = 1.0
    sizes: tuple[int, int, int, int, int, int] | None = None
    """Vocabulary, layers, width, heads, key-value heads, feed-forward width, where rows do not print them."""


# Models by how their names begin. Source: Lightning-AI/litgpt@5895df10, litgpt/config.py.
_FAMILIES = {
    "phi-1": _Family(gated=False, parallel=True, shared_norm=True, bias=True, head_bias=True, rotary=0.5),
    "stablelm": _Family(gated=False, parallel=True, bias=True, rotary=0.25),
    "llama": _Family(gated=True, parallel=False),
    "mistral-7b": _Family(gated=True, parallel=False, sizes=(32000, 32, 4096, 32, 8, 14336)),
    "falcon-7b": _Family(
        gated=False, parallel=True, shared_norm=True, sizes=(65024, 32, 4544, 71, 1, 4 * 4544)
    ),
}


def _shape(row: Row) -> Shape:
    from preflop.published.litgpt import Shape

    name = row.text("model").casefold()
    family = next((found for start, found in _FAMILIES.items() if name.startswith(start)), None)
    if family is None:
        raise CannotBuild(f"which operators {row.text('model')} has in litgpt is not known here")
    columns = ("vocab", "layers", "hidden", "heads", "kv_heads", "ffn")
    known = None if row.whole("layers") else family.sizes
    vocab, layers, hidden, heads, groups, ffn = known or [row.needed(column) for column in columns]
    return Shape(
        vocab=vocab, layers=layers, hidden=hidden, heads=heads, groups=groups, ffn=ffn, length=row.needed("seq"),
        gated=family.gated, parallel=family.parallel, shared_norm=family.shared_norm, bias=family.bias,
        head_bias=family.head_bias, rotary=family.rotary, method=_method(row, layers * hidden),
        rank=32 if "config_hub" in row.source else 8, quantized=_quantized(row),
    )  # fmt: skip


def _method(row: Row, width: int) -> str:
    """LoRA, or an adapter of the first or second kind, told by how many parameters it trains."""
    peft = row.text("peft").casefold()
    if peft in ("lora", "qlora"):
        return "lora"
    if peft != "adapter":
        raise CannotBuild(f"litgpt's {peft or 'unnamed'} fine-tuning is not built")
    trained = int(row.text("extra").partition("trainable_params=")[2].partition(";")[0].replace(",", "") or 0)
    prompts = 10 * width  # ten tokens in nearly every block
    return "adapter_v2" if trained > _V2_AT_LEAST * prompts else "adapter"


def _quantized(row: Row) -> str:
    """The 4-bit format of the frozen weights, "" for bf16."""
    text = row.text("precision").casefold()
    if "nf4-dq" in text:
        return "nf4-dq"
    return "nf4" if "nf4" in text or row.text("peft").casefold() == "qlora" else ""
