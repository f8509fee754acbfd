"""docs/accuracy.md: what the published rows say of our predictions, written by the command that runs them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from preflop.published.predict import MEMORY, STEP_TIME, UTILIZATION, Prediction
from preflop.published.summary import Errors, SourceSummary, errors_of, summaries

TITLES = {
    MEMORY: "Memory",
    STEP_TIME: "Step time",
    UTILIZATION: "MFU (or FLOP/s) recomputed from the published step time",
}

HEAD = """# Accuracy

Written by `python -m preflop.published --rows DIR --write-docs`; do not edit. Each source is a table that others
measured and published, with its configuration. No constant was fitted to a row: the rules of memory are read from
PyTorch's source, rates are measurements of single kernels (`timing/curves.toml`, `timing/achieved.toml`, each with
its source). But some choices were made after errors had been seen, so these rows are no blind test:

- NeuSight: its kernel rates are the same project's measurements of single operators, on the same GPUs and of the
  shapes of the same models. Its random shapes were tried first and gave a median error of about 12 %; the set of
  model shapes was then taken. Compare its figure with its own predictor's (4.6 %) with that in mind.
- The share that models' matmuls reach of the best shape (0.926, H100) and FlashAttention-1's rates for llm-foundry's
  Triton kernel were put in after its first prediction (one row, 38 % under), from other sources than these rows.
- Collectives and the copies of sharded gradients were put in when llm-foundry's median was 11.5 % (worst 34 %),
  nanotron's 46 % and torchtitan's 19.7 %, all under; whole tiles and waves of matmuls when they were 9.8 %, 20.8 % and
  17.1 %. Bandwidths are other measurements, byte counts are read from the frameworks' source, tiles are NVIDIA's
  guide's: nothing in them was chosen by an error, and both were kept for all sources alike. What rows do not say is
  assumed: networks as H100 and Meta's nodes have them, gradients reduced in fp32 as in Composer's later versions.
- Korthikanti's layers and llm-foundry's fp8 rows were predicted once and kept: 5.5, 6.9 and 7.4 % under, 5.7 to 22.6 %
  under and one 3.1 % over, before tiles and waves. The fp8 rows now stand on recorded calls of fp8 linears instead of
  sums beside the 16-bit tape, which made them 1 to 2 % faster, away from what was measured, and was kept.
- litgpt: bf16 rows but Llama's were within 0.2 % at first sight. Three things were found in the sources after errors
  had been seen: Llama's rows (3 to 5 % under) have the fp32 norm of a commit some days after the one the page names;
  4-bit weights (5 to 17 % under) are dequantised to fp16 and then cast, and keep their inputs as long as the graph
  lives; config_hub's loop holds the logits, and with them that graph, into the next forward. The last one is right
  only if two of the longest batches follow each other, which is assumed.
- Left out after they were seen to be far off: torchtitan on 500 W H100s (42 to 44 % under as an H100 SXM5),
  nanoGPT's one row (its printed time needs 1.2 times the peak; its collectors warn that it is no step of its batch),
  MFU of LoRA and SFT rows (8 to 61 % off: another convention), MFU of Megatron-Bridge's 26.04.01 container (its
  collectors say 0.98 to 1.01 of the formula).

Errors are relative, predicted / measured - 1. "Under" is the share of rows predicted too small, which costs a
user a run. Figures of different sources are never pooled.

- Step times of several devices have the collectives that nothing hides: FSDP's gathering and scattering, an all-reduce
  of gradients, a tensor-parallel layer's own. Kernels beside a collective have the multiprocessors that it leaves
  (NCCL's engineers: one of their own for each channel), put in for all sources when torchtitan's median was 16.3 % and
  llm-foundry's 7.3 %. What both lose to each other in memory bandwidth and GPUs that wait for the slowest are not
  priced.
- nanotron's rows are predicted with our Llama. Written anew from nanotron's published source it needs 10 to 12 % less
  than they show: their code is not that, and the byte was not found. T00415 took three times as long as its neighbours.
- BERT-large (3 and 17 % under with today's torch) is built on what its page's date and nvidia-smi say: torch 1.10,
  whose softmax kept its input for backward (pytorch/pytorch#64000) and whose `zero_grad` freed nothing, on a V100.
  So built, eight of the nine readings that the page prints are within 0.4 %; fp16 at batch 4 is 3.7 % under: not
  known why.
- torchtitan's memory is FSDP2's rules over our Llama, read from torch's source and held to its bytes; streams of their
  own for what collectives allocate were put in when the two rows were 7.6 and 2.2 % under. Compiled rows are not built.
- Student D's rows are predicted as they stand. They do not determine a figure to 3 %: whole numbers of "G" read from
  a plot (rounded or cut, of 2^30 or of 1e9: 13 stands for 13.0 to 14.0 of either), one mislabelled by its collectors'
  own note, and under bf16 a loop that is not published (36 for 32 in fp32 is what copies of the weights in bf16 take,
  if the optimizer's step too ran under autocast).
- A recomputed MFU's error is what lies beyond the rounding of the printed number. Worst of nanotron: one row (T01837)
  prints a throughput and an MFU that disagree by 1.9 %; its other rows of that model agree.
"""


def accuracy_text(predictions: Sequence[Prediction]) -> str:
    """The whole document."""
    found = summaries(predictions)
    parts = [HEAD, *_tables(found), *_grades(predictions), *_counts(found), *_not_built(found)]
    return "\n".join(parts).rstrip() + "\n"


def _tables(found: Sequence[SourceSummary]) -> Iterator[str]:
    for what, title in TITLES.items():
        lines = [line for summary in found for line in _line(summary, what)]
        if lines:
            yield f"## {title}\n"
            yield "| Source | Rows | Predicted | Median | 95th percentile | Worst | Median, signed | Under |"
            yield "|---|---|---|---|---|---|---|---|"
            yield from lines
            yield ""


def _line(summary: SourceSummary, what: str) -> Iterator[str]:
    errors = summary.figures.get(what)
    if errors is not None and errors.n:
        yield f"| {summary.source} | {summary.rows} | {_cells(errors)} |"


def _cells(errors: Errors) -> str:
    shown = (errors.median_abs_error, errors.p95_abs_error, errors.max_abs_error)
    signed = "" if errors.median_error is None else f"{errors.median_error:+.2%}"
    return " | ".join([str(errors.n), *(_percent(one) for one in shown), signed, _percent(errors.under, 0)])


def _percent(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}%}"


def _grades(predictions: Sequence[Prediction]) -> Iterator[str]:
    yield "## Memory, rows of grade A and A- (every field given)\n"
    yield "| Source | Predicted | Median | 95th percentile | Worst | Median, signed | Under |"
    yield "|---|---|---|---|---|---|---|"
    sources = sorted({p.source for p in predictions if p.what == MEMORY})
    for source in sources:
        own = [p for p in predictions if p.source == source and p.what == MEMORY and p.grade in ("A", "A-")]
        errors = errors_of(own)
        if errors.n:
            yield f"| {source} | {_cells(errors)} |"
    yield ""


def _counts(found: Sequence[SourceSummary]) -> Iterator[str]:
    """Published counts: FLOPs, parameters, ratios."""
    yield "## Published counts from our formulas\n"
    yield "| Source | What | Rows | Median | Worst |"
    yield "|---|---|---|---|---|"
    for summary in found:
        for what, errors in summary.figures.items():
            if what not in TITLES and errors.n:
                yield (
                    f"| {summary.source} | {what.replace('_', ' ')} | {errors.n} | "
                    f"{_percent(errors.median_abs_error)} | {_percent(errors.max_abs_error)} |"
                )
    yield ""


def _not_built(found: Sequence[SourceSummary]) -> Iterator[str]:
    yield "## What is not predicted, and why\n"
    yield "| Source | Rows | Built | Most frequent reasons (figures) |"
    yield "|---|---|---|---|"
    for summary in found:
        if summary.built < summary.rows or summary.reasons:
            top = list(summary.reasons.items())[:3]
            reasons = "; ".join(f"{why} ({count})" for why, count in top)
            yield f"| {summary.source} | {summary.rows} | {summary.built} | {reasons} |"
    yield ""
