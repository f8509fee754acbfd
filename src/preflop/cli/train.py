"""`preflop train`: run what was priced."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from preflop.trainer.config import TrainConfig

Text = str | None


def _option(text: str) -> Any:
    return typer.Option(help=text, show_default=False)


def command(
    config: Annotated[
        Text, typer.Option(help="Settings in TOML; flags go before them.", metavar="FILE.toml")
    ] = None,
    model: Annotated[Text, _option("A model of `preflop models` (gpt2-nano).")] = None,
    data: Annotated[Text, _option("The folder that `preflop data` made.")] = None,
    out: Annotated[Text, _option("The run's folder.")] = None,
    steps: Annotated[Text, _option("Steps in all.")] = None,
    epochs: Annotated[Text, _option("Times that every sample is seen, instead of --steps.")] = None,
    batch: Annotated[Text, _option("Sequences that one forward sees (8).")] = None,
    seq: Annotated[Text, _option("Tokens of a sequence (128).")] = None,
    microbatches: Annotated[Text, _option("Batches of a step, over all processes (1).")] = None,
    precision: Annotated[Text, _option("fp32 (default), bf16-mixed, fp16-mixed, bf16, ...")] = None,
    optimizer: Annotated[Text, _option("adamw-fused (default), adamw, sgd, ...")] = None,
    learning_rate: Annotated[Text, _option("At the end of the warm-up (1e-3).")] = None,
    warmup_steps: Annotated[Text, _option("Steps while the rate rises (10).")] = None,
    decay_steps: Annotated[Text, _option("Steps until the cosine ends (all).")] = None,
    weight_decay: Annotated[Text, _option("On matrices (0.1).")] = None,
    clip: Annotated[Text, _option("Largest gradient norm (1.0); 0: any.")] = None,
    dropout: Annotated[Text, _option("Instead of the model's own.")] = None,
    vocab: Annotated[Text, _option("Rows of the embedding (the data's vocabulary).")] = None,
    recompute: Annotated[Text, _option("none (default), block or selective.")] = None,
    seed: Annotated[Text, _option("Of everything random (0).")] = None,
    checkpoint_every: Annotated[Text, _option("Steps between checkpoints (100); 0: none.")] = None,
    keep: Annotated[Text, _option("Newest checkpoints that stay (3), beside the best.")] = None,
    async_save: Annotated[bool | None, typer.Option(help="Save beside the loop.", show_default=False)] = None,
    evaluate_every: Annotated[Text, _option("Steps between evaluations (with checkpoints); 0: none.")] = None,
    evaluate_batches: Annotated[Text, _option("Batches of an evaluation (20).")] = None,
    workers: Annotated[Text, _option("Processes that read data ahead (0).")] = None,
    device: Annotated[Text, _option("auto (default), cpu or cuda.")] = None,
    shard: Annotated[Text, _option("Under torchrun: ddp (default) or fsdp.")] = None,
    max_skipped: Annotated[Text, _option("Bad steps in a row that end the run (20).")] = None,
    log_every: Annotated[Text, _option("Steps between lines in a pipe (a second; all of up to 20).")] = None,
    tensorboard: Annotated[
        bool | None, typer.Option(help="Write TensorBoard events too.", show_default=False)
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest valid checkpoint.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Start although the run does not fit.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Hold two real steps against the prediction, and do not train.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print how it ended as JSON, and nothing else.")
    ] = False,
) -> None:
    """Train a model, after pricing a step: refuses what does not fit, shows what was predicted beside what
    is measured, and saves so that a crash costs nothing. Exit status 1: it does not fit, or cannot go on."""
    given = dict(locals())
    for name in ("config", "resume", "force", "verify", "as_json"):
        given.pop(name)
    # The profiler, which reads the peak of one step, writes to standard error unless told before torch comes.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    from preflop.trainer.processes import check_shared
    from preflop.trainer.settings import settings

    check_shared(shard)
    wanted = settings(given, config=config, resume=resume)
    if verify:
        _verify(wanted, as_json=as_json)
        return
    from preflop.trainer.display import Lines, Silent
    from preflop.trainer.loop import TrainingStopped, train
    from preflop.trainer.preflight import DoesNotFit

    display = Silent() if as_json else Lines(every=wanted.log_every)
    try:
        result = train(wanted, resume=resume, force=force, display=display)
    except (DoesNotFit, TrainingStopped) as error:
        typer.echo(f"preflop: {error}", err=True)
        raise typer.Exit(1) from error
    if as_json:
        import json

        typer.echo(json.dumps(result.to_dict(Path(wanted.out)), indent=2))


def _verify(wanted: TrainConfig, *, as_json: bool) -> None:
    """The trainer's own step, as `preflop verify` shows any step."""
    from preflop.trainer.preflight import verify_own_step

    found = verify_own_step(wanted)
    if as_json:
        import json

        typer.echo(json.dumps(found.to_dict(), indent=2))
    else:
        from preflop.report.verify_table import show

        show(found)
    if not found.verifies:
        raise typer.Exit(1)
