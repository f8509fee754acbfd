"""`preflop data`: text files to a folder of tokens."""

from __future__ import annotations

from typing import Annotated

import typer


def command(
    texts: Annotated[list[str], typer.Argument(help="Text files, or folders of them.", metavar="TEXT...")],
    out: Annotated[str, typer.Option(help="The folder to make.", metavar="DIR")],
    tokenizer: Annotated[str, typer.Option(help="bytes, or bpe (learned from the texts).")] = "bytes",
    vocab: Annotated[str, typer.Option(help="Token ids of the bpe tokenizer.")] = "4096",
    validation: Annotated[str, typer.Option(help="Share of each text that validates, from its end.")] = "0.1",
    files: Annotated[str, typer.Option(help="Which files of a folder are text.", metavar="GLOB")] = "*.txt",
    force: Annotated[bool, typer.Option("--force", help="Replace data that is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was made as JSON.")] = False,
) -> None:
    """Turn text files into tokens that `preflop train` reads: a memory-mapped file for training, one for
    validation, and a manifest. A corpus may be larger than memory."""
    from preflop.quantity import read_count, read_number
    from preflop.trainer.corpus import write_data

    data = write_data(
        texts,
        out,
        tokenizer=tokenizer,
        vocab=read_count(vocab, "--vocab"),
        validation_share=float(read_number(validation, "--validation")),
        files=files,
        force=force,
    )
    if as_json:
        import json

        typer.echo(json.dumps(data.to_dict(), indent=2))
    else:
        from preflop.report.terminal import print_lines

        print_lines(
            f"{data.folder}: {len(data.train):,} tokens to train on, {len(data.validation):,} to validate, "
            f"{data.vocab:,} ids ({data.tokenizer})."
        )
