"""`preflop einsum`: a named expression, priced. Needs no torch."""

from __future__ import annotations

from typing import Annotated

import typer


def command(
    expression: Annotated[
        str, typer.Argument(help='"b s d, d f -> b s f", or a pattern: "b s (h d) -> b h s d".')
    ],
    sizes: Annotated[
        list[str] | None, typer.Argument(help="A size per axis: b=8 s=2048 ...", metavar="[AXIS=SIZE]...")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the operands: bf16, fp32, tf32, fp8...")] = "bf16",
    out_dtype: Annotated[str | None, typer.Option(help="Of the result (default: the operands').")] = None,
    device: Annotated[str | None, typer.Option(help="A device of `preflop hardware`.")] = None,
    reduction: Annotated[
        str, typer.Option("--reduce", help="How a pattern loses axes: sum, mean, max, min, prod.")
    ] = "sum",
    layout: Annotated[
        str | None,
        typer.Option(help='A pattern\'s operand in memory, outermost axis first: "b s h d".', metavar="AXES"),
    ] = None,
    strides: Annotated[
        str | None, typer.Option(help="The same as strides, in elements: 786432,64,65536,1.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """FLOPs, bytes, intensity, bound and time of an expression over named axes, and of each operand's
    gradient; for several operands the cheapest order; for a pattern of one tensor, view or copy."""
    from preflop.quantity import read_sizes, read_strides
    from preflop.report.einsum import einsum_json, show_einsum
    from preflop.timing.einsum import einsum_cost

    cost = einsum_cost(
        expression, read_sizes(sizes or []), dtype=dtype, out_dtype=out_dtype, device=device,
        reduction=reduction, layout=layout, strides=None if strides is None else read_strides(strides),
    )  # fmt: skip
    if as_json:
        import json

        typer.echo(json.dumps(einsum_json(cost), indent=2))
    else:
        show_einsum(cost)
