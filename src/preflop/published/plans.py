"""From a row to what is recorded: a subject, a device, and how its reading is taken from the tape.

Each builder says in its docstring whose code it stands for. What a row does not say is not guessed:
`CannotBuild` gives the reason.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from preflop.errors import PreflopError
from preflop.hardware.catalog import find as find_device
from preflop.hardware.device import Device
from preflop.published.conventions import Sizes, sizes_of
from preflop.published.finetuning import litgpt_plan
from preflop.published.plan import Plan, Shards, device_of
from preflop.published.rows import CannotBuild, Row, Table, neusight_models
from preflop.subject import Subject, resolve
from preflop.timing.collective import GPUS_PER_NODE, Collective, Ranks, Sharding
from preflop.transforms.fully_sharded import Sharded

FP32, BF16 = "fp32", "bf16"


def plan_of(row: Row) -> Plan:
    """How this row is built.

    Raises:
        CannotBuild: it is not, and why.
    """
    if row.table is Table.LATENCY:
        return _neusight(row)
    if row.table not in (Table.MEMORY, Table.THROUGHPUT):
        raise CannotBuild("this table measures no step")
    if row.text("kind") == "context_measured":
        raise CannotBuild("a context alone: nothing is recorded")
    for prefix, builder in _BUILDERS:
        if row.source.startswith(prefix):
            _refuse(row)
            plan = builder(row)
            if "fp8" in _precision(row):
                plan = _with_fp8_linears(plan)
            return dataclasses.replace(plan, fused=True) if row.text("compile") == "1" else plan
    raise CannotBuild("this source's model is not built here")


def _with_fp8_linears(plan: Plan) -> Plan:
    """The same, its blocks' linears in fp8 as `--precision fp8` records them, whichever library the run had."""
    precision = dataclasses.replace(plan.subject.precision, fp8_linears=True)
    return dataclasses.replace(
        plan, key=(*plan.key, "fp8"), subject=dataclasses.replace(plan.subject, precision=precision),
        assumed=(*plan.assumed, "fp8: the blocks' linears as Transformer Engine's with delayed scaling"),
    )  # fmt: skip


def _refuse(row: Row) -> None:
    """What no builder can do yet."""
    for name, words in (("tp", "tensor"), ("pp", "pipeline"), ("cp", "context"), ("ep", "expert")):
        degree = row.whole(name)
        if degree and degree > 1 and not row.source.startswith("Korthikanti"):
            raise CannotBuild(f"{words} parallelism of {degree}: only static sharding is done here")
    if row.whole("experts"):
        raise CannotBuild("a mixture of experts is not built")
    if row.text("compile") == "1" and row.table is Table.MEMORY:
        raise CannotBuild("a compiled step: what inductor keeps for backward is not modelled")
    if "fp8" in _precision(row) and row.table is Table.MEMORY:
        raise CannotBuild("which library's fp8 linears these are, and so what they keep for backward, is not known")


def _precision(row: Row) -> str:
    return row.text("precision").casefold().replace("float8", "fp8")


def _attention_kernel(row: Row) -> str:
    """Which fused kernel the run had. Triton's of early 2023 is FlashAttention-1's algorithm; torch took
    cuDNN's on Hopper only from 2.5 on (release notes), so SDPA of 2024 is flash."""
    implementation = row.text("attn_impl").casefold()
    if "triton" in implementation:
        return "efficient"
    return "flash"


# -- CS336 ------------------------------------------------------------------------------------------


def _cs336(row: Row) -> Plan:
    """Stanford CS336's staff model, by einsum and einops, with its own loss and AdamW (`staff.py`)."""
    if "own model code" in row.text("notes"):
        raise CannotBuild("the student's own model: its code is not the staff's")
    if "attention only" in row.text("model") or "scaled_dot_product_attention" in row.text("model"):
        return _plain_attention(row)
    kind, phase = row.text("kind"), row.text("phase")
    length, batch = row.needed("seq"), row.needed("micro_batch")
    segment = re.search(r"segments of (\d+)", row.text("ckpt"))
    mode = "train"
    if kind == "forward_time_measured" or "no_grad" in phase:
        mode = "inference"
    elif kind == "forward_peak_measured":
        mode = "forward"
    elif kind == "forward_backward_time_measured":
        mode = "backward"
    precision = "bf16-mixed" if "bf16" in row.text("precision") else FP32
    sizes = tuple(row.needed(name) for name in ("vocab", "layers", "hidden", "heads", "ffn"))
    device, why = device_of(row)
    key = ("cs336", sizes, length, batch, int(segment[1]) if segment else 0, mode, precision)
    subject = _cs336_subject(sizes, length, batch, key[4], mode, precision, device)
    degree = row.whole("dp") or 1
    sharded = "shard" in row.text("sharding").casefold() or "zero" in row.text("sharding").casefold()
    reading = {"forward": "forward", "inference": "forward"}.get(mode, "allocated")
    if kind == "train_stage_measured":
        reading = "static"
        if "first optimizer step" in phase:
            reading = "first"
    return Plan(
        key=(*key, device.compute_capability if device else None), subject=subject, device=device,
        no_time=why or ("gradients are averaged over processes" if degree > 1 else ""), memory=reading,
        shards=Shards(states=degree if sharded else 1),
        phases=("forward",) if mode == "inference" else ("forward", "backward", "recompute", "optimizer"),
    )  # fmt: skip


def _cs336_subject(
    sizes: tuple[int, ...],
    length: int,
    batch: int,
    segment: int,
    mode: str,
    precision: str,
    device: Device | None,
) -> Subject:
    import torch

    from preflop.published import staff

    vocab, layers, hidden, heads, ffn = sizes
    ids = torch.zeros(batch, length, dtype=torch.int64)
    loop = staff.Loop(ids)

    def model() -> Any:
        built = staff.LanguageModel(vocab, length, hidden, layers, heads, ffn, segment=segment)
        return staff.ForwardOnly(built) if mode == "inference" else built

    loss: Callable[[Any], Any] | None = loop.loss
    if mode == "forward":
        loss = _mean
    elif mode == "inference":
        loss = None
    elif mode == "backward":
        loss = staff.Loop(ids).free_loss
    return resolve(
        model, ids, loss=loss, optimizer=loop.optimizer if mode == "train" else None, precision=precision,
        device=device.id if device else _A100,
    )  # fmt: skip


_A100 = "a100-sxm4-80gb"


def _mean(output: Any) -> Any:
    return output.mean()


def _sum(output: Any) -> Any:
    return output.sum()


def _plain_attention(row: Row) -> Plan:
    """Hand-written attention over three tensors, forward and backward."""
    import torch

    from preflop.published import staff

    batch, length, width = row.needed("micro_batch"), row.needed("seq"), row.needed("hidden")
    device, why = device_of(row)
    subject = resolve(
        lambda: staff.PlainAttention(batch, length, width), torch.zeros(1), loss=_sum, optimizer=None,
        device=device.id if device else _A100,
    )  # fmt: skip
    return Plan(
        key=("attention", batch, length, width), subject=subject, device=device, no_time=why, memory="kept"
    )


# -- dense decoders, sharded statically -----------------------------------------------------------------


def _facts(row: Row, sizes: Sizes) -> Any:
    """Our reference decoder with the row's dimensions."""
    from preflop.models.catalog import Activation, find

    llama = sizes.gated
    base = find("llama-2-7b" if llama else "gpt2")
    changed: dict[str, Any] = {
        "layers": sizes.layers, "hidden": sizes.hidden, "heads": sizes.heads, "kv_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim, "ffn": sizes.ffn, "vocab": sizes.vocab, "max_positions": sizes.sequence,
        "tied_embeddings": sizes.tied if llama else True, "dropout": 0.0, "attention_dropout": 0.0,
    }  # fmt: skip
    if not llama:
        changed["activation"] = Activation.GELU
    return dataclasses.replace(base, **changed)


def _decoder(row: Row, precision: str, optimizer: str | None, *, fused_norms: bool = False) -> Plan:
    """The row's dimensions on our reference decoder (GPT-2 without dropout, or Llama)."""
    sizes = sizes_of(row)
    batch = row.needed("micro_batch")
    device, why = device_of(row)
    if device is None and "h100" in row.text("gpu"):
        why = f"the catalog has no {row.text('gpu')}: its power limit sets clocks that nobody published"
    rules = device or find_device("h100-sxm" if "h100" in row.text("gpu") else _A100)
    facts = _facts(row, sizes)
    recompute = _recompute(row)

    def model() -> Any:
        from preflop.models.build import build

        built = build(facts)
        if fused_norms:
            _fuse_norms(built)
        if recompute is SAVES_HALF:
            from preflop.published.selective import save_every_second_matmul

            save_every_second_matmul(built.blocks)
        return built

    def data() -> Any:
        from preflop.models.build import example_batch

        return example_batch(facts, batch, sizes.sequence)

    subject = resolve(
        model, data, optimizer=optimizer, precision=precision,
        recompute="none" if recompute is SAVES_HALF else recompute,
        device=rules.id,
    )  # fmt: skip
    key = ("decoder", sizes, batch, precision, optimizer, recompute, rules.compute_capability, fused_norms)
    return Plan(
        key=key, subject=subject, device=device, no_time=why, kernels=_attention_kernel(row),
        microbatches=row.whole("grad_accum") or 1,
    )  # fmt: skip


def _fuse_norms(model: Any) -> None:
    """RMS norms as one kernel, where the run's were."""
    from torch import nn

    from preflop.models.layers import RMSNorm

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, RMSNorm):
                setattr(parent, name, nn.RMSNorm(child.weight.shape[0], eps=child.eps))


SAVES_HALF = "saves every second matmul"
"""torchtitan's selective recomputation, set in the model (`selective.py`)."""


def _recompute(row: Row) -> Any:
    text = row.text("ckpt").casefold()
    if "every 2nd" in text:
        return every_second
    if text in ("", "none"):
        return "none"
    if text.startswith("full"):
        return "block"
    if "selective" in text and "op" in text:
        return SAVES_HALF if row.source.startswith(("torchtitan", "torchao")) else "selective"
    raise CannotBuild(f"recomputation {row.text('ckpt')!r} is not built")


def every_second(name: str) -> bool:
    """Whether the module is every second block."""
    return bool(re.fullmatch(r"blocks\.\d*[02468]", name))


# Bytes per parameter that a fused AdamW reads and writes: reads weight, gradient and two moments, writes
# weight and two moments, each four bytes.
_ADAMW_BYTES = 28
# The same by lists (foreach), operator by operator: two scalings 16, both moments 24, root, division and eps 24, the
# update 16; and clipping, which reads every gradient for its norm and scales it, 12.
_CLIPPED_FOREACH_ADAMW_BYTES = 92


def _sharded(row: Row, degree: int, rules: _FullySharded, *, fused_norms: bool = False) -> Plan:
    """Weights gathered in bf16 block by block, everything else in fp32 on `degree` devices."""
    plan = _decoder(row, BF16, None, fused_norms=fused_norms)
    sizes = sizes_of(row)
    parameters = sizes.total
    link, assumed = rules.link(row)
    return dataclasses.replace(
        plan,
        optimizer_bytes=(rules.optimizer_bytes + 12 * (plan.microbatches - 1)) * parameters // degree,
        copied_bytes=rules.copied_bytes * parameters,
        ranks=Ranks(count=degree, link_bytes_per_s=link),
        sharding=Sharding(
            units=sizes.layers + 1, gathered_bytes=2 * parameters, reduced_bytes=rules.reduced_bytes * parameters,
            regathers="GRAD_OP" not in row.text("sharding"), prefetches=rules.prefetches,
        ),
        assumed=(*plan.assumed, *assumed),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class _FullySharded:
    """How a source's FSDP moves weights and gradients, in bytes per parameter."""

    prefetches: bool
    reduced_bytes: int
    """Of a gradient as it is sent."""
    optimizer_bytes: int
    """What an update reads and writes."""
    copied_bytes: int
    """What a microbatch copies besides: gradients into flat ones, casts, gathered weights out of flat ones."""
    usual_link: float
    """Network per GPU in bytes per second, where the row does not say."""
    usual: str

    def link(self, row: Row) -> tuple[float | None, tuple[str, ...]]:
        """(bytes per second and GPU between nodes, what was assumed)."""
        printed = re.search(r"(\d+) Gbps node", row.text("section"))
        if printed:
            return float(printed[1]) * 1e9 / 8 / GPUS_PER_NODE, ()
        return self.usual_link, (self.usual,) if (row.whole("gpus") or 1) > GPUS_PER_NODE else ()


def _foundry(row: Row) -> Plan:
    """llm-foundry's MPT under Composer's FSDP: AdamW on fp32 shards. No memory column.

    Composer gathers in bf16 and prefetches after a unit's gradients (`backward_prefetch` BACKWARD_POST); gradients
    are reduced in fp32 under mixed precision DEFAULT, in bf16 under PURE (composer/utils/misc.py,
    distributed/mosaic_fsdp_utils.py, `get_mixed_precision`). torch's FSDP splits a flat weight into views: their
    gradients are joined by a copy in bf16 (2 read, 2 written), and cast for the reduction (2 and 4).
    """
    fp32 = "PURE" not in row.text("extra")
    rules = _FullySharded(
        prefetches=False, reduced_bytes=4 if fp32 else 2, optimizer_bytes=_ADAMW_BYTES,
        copied_bytes=10 if fp32 else 4, usual_link=_DGX_H100,
        usual="nodes of H100s joined by 400 Gbit/s per GPU, as NVIDIA's DGX H100 is sold",
    )  # fmt: skip
    plan = _sharded(row, row.whole("dp") or 1, rules)
    return dataclasses.replace(plan, no_memory="the row gives no memory")


def _titan(row: Row) -> Plan:
    """torchtitan's Llama under FSDP2, fused RMS norms.

    FSDP2 prefetches before a unit's gradients, copies gathered weights out twice (2 read, 2 written each) and
    gradients in while it casts them (2 and 4), and reduces in fp32 (torch/distributed/fsdp/_fully_shard,
    `foreach_all_gather_copy_out`, `foreach_reduce`). The last block's weights are kept for backward
    (torchtitan/parallelisms/parallelize_llama.py of 2024, `apply_fsdp`). Gradients are clipped and AdamW runs by lists
    (torchtitan@1ea476e9f, train.py).
    """
    rules = _FullySharded(
        prefetches=True, reduced_bytes=4, optimizer_bytes=_CLIPPED_FOREACH_ADAMW_BYTES, copied_bytes=14,
        usual_link=_META_A100,
        usual="nodes of A100s joined by 200 Gbit/s per GPU, as Meta's are (arXiv 2307.09288, section 2.2.1)",
    )  # fmt: skip
    plan = _sharded(row, row.whole("dp") or row.needed("gpus"), rules, fused_norms=True)
    how = Sharded(keeps_last=True, kept_dtype="float32", reduced_dtype="float32", states=2)
    return dataclasses.replace(plan, fully_sharded=how, memory="reserved")


# Bytes per second and GPU between nodes, as sold.
_DGX_H100 = 400e9 / 8
_META_A100 = 200e9 / 8


def _nanotron(row: Row) -> Plan:
    """nanotron: bf16 weights, gradients added to fp32 buffers, fp32 master copy and AdamW; ZeRO-1 divides
    the last two. RMS norms as one kernel (Triton).

    Gradients are all-reduced in fp32 once a step: under ZeRO-0 by DDP's hook during the last backward, under ZeRO-1
    after it, and then the bf16 weights are gathered (huggingface/nanotron@2cde8f63, trainer.py, optim/zero.py). The
    network is the one whose collectives the same authors measured.
    """
    plan = _decoder(row, BF16, None, fused_norms=True)
    degree = row.whole("dp") or 1
    zero_1 = "1" in row.text("sharding")
    sharded = degree if zero_1 else 1
    parameters = sizes_of(row).total
    gathered = ((Collective.ALL_GATHER, 2.0 * parameters, False),) if zero_1 else ()
    return dataclasses.replace(
        plan, drop_gradients=True, static_bytes=4 * parameters + 12 * parameters // sharded,
        optimizer_bytes=(_ADAMW_BYTES + 2) * parameters // sharded + 10 * parameters * plan.microbatches,
        ranks=Ranks(count=degree, network="efa"),
        synced=((Collective.ALL_REDUCE, 4.0 * parameters, not zero_1), *gathered),
    )  # fmt: skip


def _nanogpt(row: Row) -> Plan:
    """nanoGPT: GPT-2 without dropout under bf16 autocast, fused AdamW, on every device."""
    return dataclasses.replace(
        _decoder(row, "bf16-mixed", "adamw-fused"), no_memory="the row gives no memory"
    )


# -- Megatron ---------------------------------------------------------------------------------------


def _megatron_layer(row: Row) -> Plan:
    """One layer of Korthikanti et al.'s table 4, on one of its tensor-parallel ranks.

    Forward waits for its collectives. Backward hides those that a weight's gradient can be computed beside
    (Megatron-LM, core/tensor_parallel/layers.py); with sequence parallelism it waits for two gathers of gradients.
    """
    import torch

    from preflop.published.megatron import Layer, Shape

    if row.text("kind") != "layer_time_measured":
        raise CannotBuild("pipelines of several stages are not built")
    degree, length, hidden = row.whole("tp") or 1, row.needed("seq"), row.needed("hidden")
    parallel = row.text("seq_parallel") == "1"
    selective = "selective" in row.text("ckpt")
    if "full" in row.text("ckpt"):
        raise CannotBuild("the full recomputation of one layer is not built")
    shape = Shape(
        hidden=hidden, heads=row.needed("heads"), ffn=row.needed("ffn"), length=length,
        batch=row.needed("micro_batch"), degree=degree, sequence_parallel=parallel, selective=selective,
    )  # fmt: skip
    device, why = device_of(row)
    subject = resolve(
        lambda: Layer(shape), torch.zeros(1), loss=_sum, optimizer=None, device=device.id if device else _A100
    )
    message = 2.0 * length * shape.batch * hidden
    forward = [Collective.ALL_GATHER, Collective.REDUCE_SCATTER] if parallel else [Collective.ALL_REDUCE]
    waits = [*forward, Collective.ALL_GATHER] if parallel else forward
    return Plan(
        key=("megatron layer", shape), subject=subject, device=device, no_time=why, no_memory="the row gives no memory",
        ranks=Ranks(count=degree), synced=tuple((what, message, False) for what in waits * 2),
    )  # fmt: skip


# -- transformers -------------------------------------------------------------------------------------


def _hugging_face(make: Callable[[Any], Any]) -> Callable[[], Any]:
    def model() -> Any:
        try:
            import transformers
        except ImportError as error:
            raise CannotBuild("transformers is not installed here") from error
        return make(transformers)

    return model


def _bert_large(row: Row) -> Plan:
    """BERT-large for sequence classification in transformers' trainer of January 2022, on torch 1.10 (`bert.py`).

    The reading is the device's used memory at the end: what the allocator reserved, and the context, which the same
    page measured.
    """
    import torch

    from preflop.published import bert

    optimizer = next((made for word, made in _TRAINER_OPTIMIZERS if word in row.text("optimizer").casefold()), None)
    if optimizer is None:
        raise CannotBuild(f"the trainer's {row.text('optimizer') or 'unnamed'} optimizer is not built")
    batch, length = row.needed("micro_batch"), row.needed("seq")
    accumulated = min(row.whole("grad_accum") or 1, 2)
    recompute = row.text("ckpt") not in ("", "none")
    precision = "fp16-mixed" if "fp16" in _precision(row) else FP32

    def data() -> Any:
        ids = torch.arange(batch * length).reshape(batch, length) % bert.VOCABULARY
        return {"ids": ids, "labels": torch.zeros(batch, dtype=torch.int64)}

    subject = resolve(
        lambda: bert.SequenceClassifier(recompute=recompute), data, optimizer=getattr(bert, optimizer),
        precision=precision, device=_BERT_DEVICE, microbatches=accumulated,
    )  # fmt: skip
    return Plan(
        key=("bert-large", batch, length, accumulated, recompute, precision, optimizer), subject=subject, device=None,
        no_time="the trainer's data loading and logging are in the printed time", memory="used", settled=True,
        context_bytes=round(1.312 * 2**30),
        assumed=("the context as the same page measured it, 1.312 GiB", "torch 1.10, the release of the page's date"),
    )  # fmt: skip


# By the page's own nvidia-smi. Optimizers by a word of how rows name them, and what stands for them in `bert.py`.
_BERT_DEVICE = "v100-sxm2-16gb"
_TRAINER_OPTIMIZERS = (("8-bit", "Adam8bit"), ("8bit", "Adam8bit"), ("adafactor", "Adafactor"), ("adamw", "AdamW"))


_NEUSIGHT_HEADS = {"gpt": "GPT2LMHeadModel", "opt": "OPTForCausalLM"}


def _neusight(row: Row) -> Plan:
    """NeuSight's models: transformers with eager attention, fp32 without TF32; `inf` is one forward without
    gradients in evaluation mode, `train` forward and backward."""
    option, name, mode = row.text("option"), row.text("model_name"), row.text("mode")
    if option:
        what = "operators fused by torch.compile" if option == "fusion" else f"four devices ({option})"
        raise CannotBuild(f"{what}: not modelled")
    if name.startswith("switch"):
        raise CannotBuild("a mixture of experts is not built")
    shape = neusight_models(row.folder).get(name)
    if shape is None:
        raise CannotBuild(f"no sizes of {name} beside the table")
    device, why = device_of(row)
    if device is None:
        raise CannotBuild(why)
    batch, length = row.needed("batch"), row.needed("seqlen")
    subject = _neusight_subject(name, tuple(sorted(shape.items())), batch, length, mode, device)
    return Plan(
        key=("neusight", name, batch, length, mode, device.compute_capability), subject=subject, device=device,
        no_memory="the row gives no memory", phases=("forward",) if mode == "inf" else ("forward", "backward"),
    )  # fmt: skip


def _neusight_subject(
    name: str, shape: tuple[tuple[str, int], ...], batch: int, length: int, mode: str, device: Device
) -> Subject:
    import torch

    def make(transformers: Any) -> Any:
        from preflop.published.staff import ForwardOnly

        options = {**dict(shape), "attn_implementation": "eager"}
        if name.startswith("bert"):
            head = "BertForSequenceClassification" if mode == "inf" else "BertForPreTraining"
            built = getattr(transformers, head)(transformers.BertConfig(**options))
        elif name.startswith("opt"):
            extra = {"word_embed_proj_dim": options["hidden_size"]}
            built = transformers.OPTForCausalLM(transformers.OPTConfig(**options, **extra))
        else:
            built = transformers.GPT2LMHeadModel(transformers.GPT2Config(**options))
        built.config.use_cache = False
        return ForwardOnly(built.eval()) if mode == "inf" else built

    def data() -> Any:
        ids = torch.arange(batch * length).reshape(batch, length) % 30522
        if mode == "inf" or not name.startswith("bert"):
            return {"input_ids": ids} if mode == "inf" else {"input_ids": ids, "labels": ids.clone()}
        labels = torch.zeros(batch, dtype=torch.int64)
        return {"input_ids": ids, "labels": ids.clone(), "next_sentence_label": labels}

    return resolve(_hugging_face(make), data, optimizer=None, precision=FP32, device=device.id)


_BUILDERS: tuple[tuple[str, Callable[[Row], Plan]], ...] = (
    ("CS336", _cs336),
    ("llm-foundry", _foundry),
    ("torchtitan benchmarks", _titan),
    ("torchtitan docs", _titan),
    ("torchtitan asyncTP", _titan),
    ("torchao pretraining", _titan),
    ("HF Ultra-Scale Playbook benchmarks", _nanotron),
    ("karpathy/nanoGPT", _nanogpt),
    ("HF transformers docs", _bert_large),
    ("litgpt", litgpt_plan),
    ("Korthikanti", _megatron_layer),
)

__all__ = ["CannotBuild", "Plan", "PreflopError", "Shards", "device_of", "plan_of"]
