"""Published counts that no step measures: GPT-3's table D.1, Chinchilla's A4 and A9, Korthikanti's figure 1."""

from __future__ import annotations

from preflop.formulas.activation_memory import (
    interleaving_factor,
    layer_bytes_tensor_parallel,
    layer_bytes_tensor_sequence_parallel_selective,
)
from preflop.formulas.work import chinchilla_core_flops_per_token, chinchilla_parameters
from preflop.published.rows import CannotBuild, Row, Table
from preflop.units import GIB


def counted(row: Row) -> tuple[str, float, float]:
    """(what, as printed, as our formulas give it).

    Raises:
        CannotBuild: the row prints no count that a formula gives.
    """
    if row.table is Table.RATIO:
        return _chinchilla(row)
    flops, parameters, tokens = row.number("train_flops"), row.number("params_b"), row.number("tokens_b")
    if flops is None or parameters is None or tokens is None:
        raise CannotBuild("the row prints no FLOPs, or not the parameters and tokens behind them")
    note = row.text("flops_unit_note")
    per_token = 3 if note.startswith("3 FLOPs") else 6 if note.startswith("6 FLOPs") else None
    if per_token is None:
        raise CannotBuild("how this source counts FLOPs is not known")
    return "train_flops", flops, per_token * parameters * 1e9 * tokens * 1e9


def _chinchilla(row: Row) -> tuple[str, float, float]:
    sizes = {
        name: row.needed(name) for name in ("layers", "seq", "hidden", "heads", "kv_size", "ffn", "vocab")
    }
    parameters = chinchilla_parameters(
        sizes["layers"], sizes["hidden"], sizes["heads"], sizes["kv_size"], sizes["ffn"], sizes["vocab"]
    )
    ratio = row.number("ratio_printed_ours_over_6ND")
    if ratio is None:
        printed = row.number("params_printed")
        if printed is None:
            raise CannotBuild("the row prints neither a ratio nor parameters")
        return "parameters", printed, parameters
    flops = chinchilla_core_flops_per_token(
        sizes["layers"], sizes["seq"], sizes["hidden"], sizes["heads"], sizes["kv_size"], sizes["ffn"]
    )
    return "flops_ratio", ratio, flops / (6 * parameters)


def korthikanti_activations(row: Row) -> tuple[str, float, float]:
    """First pipeline stage's activations: as many layers' as the model has, times the interleaving.

    A stage holds L/p layers for p microbatches in flight. Source: sections 4.2 and 4.3, figure 1.
    """
    sizes = [row.needed(name) for name in ("seq", "micro_batch", "hidden", "heads", "tp")]
    sequence, batch, width, heads, tensor = sizes
    recompute = row.text("ckpt").casefold()
    if "selective" in recompute and "sequence" in recompute:
        layer = layer_bytes_tensor_sequence_parallel_selective(sequence, batch, width, tensor)
    elif "tp only" in recompute:
        layer = layer_bytes_tensor_parallel(sequence, batch, width, heads, tensor)
    else:
        raise CannotBuild(f"recomputation {row.text('ckpt')!r} has no formula here")
    chunks = row.text("vpp").removeprefix("m=")
    factor = interleaving_factor(row.needed("pp"), int(chunks)) if chunks.isdigit() else 1.0
    gib = row.number("mem_gib")
    if not gib:
        raise CannotBuild("the row gives no memory")
    return "activation_formula", gib * GIB, layer * row.needed("layers") * factor
