"""Rows of litgpt's fine-tuning tables: one GPU, LoRA or adapters, bf16 or 4-bit weights (`litgpt.py`)."""

from __future__ import annotations

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
    the logits of one microbatch into the next, taken as equally long (both of the length that the row gives).
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
    )  # fmt: skip


def _shape(row: Row) -> Shape:
    from preflop.published.litgpt import Shape

    gated, phi = "glu" in row.text("mlp"), row.text("model").casefold().startswith("phi")
    if not gated and not phi and "stablelm" not in row.text("model").casefold():
        raise CannotBuild(f"which operators {row.text('model')} has in litgpt is not known here")
    heads = row.needed("heads")
    return Shape(
        vocab=row.needed("vocab"), layers=row.needed("layers"), hidden=row.needed("hidden"), heads=heads,
        groups=row.whole("kv_heads") or heads, ffn=row.needed("ffn"), length=row.needed("seq"), gated=gated,
        parallel=not gated, shared_norm=phi, bias=not gated, head_bias=phi,
        rotary=1.0 if gated else 0.5 if phi else 0.25, method=_method(row),
        rank=32 if "config_hub" in row.source else 8, quantized=_quantized(row),
    )  # fmt: skip


def _method(row: Row) -> str:
    """LoRA, or an adapter of the first or second kind, told by how many parameters it trains."""
    peft = row.text("peft").casefold()
    if peft in ("lora", "qlora"):
        return "lora"
    if peft != "adapter":
        raise CannotBuild(f"litgpt's {peft or 'unnamed'} fine-tuning is not built")
    trained = int(row.text("extra").partition("trainable_params=")[2].partition(";")[0].replace(",", "") or 0)
    prompts = row.needed("layers") * 10 * row.needed("hidden")
    return "adapter_v2" if trained > _V2_AT_LEAST * prompts else "adapter"


def _quantized(row: Row) -> str:
    """The 4-bit format of the frozen weights, "" for bf16."""
    text = row.text("precision").casefold()
    if "nf4-dq" in text:
        return "nf4-dq"
    return "nf4" if "nf4" in text or row.text("peft").casefold() == "qlora" else ""
