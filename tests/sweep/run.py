"""Runs the sweep: builds each pair small, records it, measures it where asked, and appends one JSON line.

    python -m tests.sweep.run [--family NAME] [--only TEXT] [--limit N] [--out FILE] [--measure]
        [--write-docs]

An interrupted run goes on where it stopped: pairs that FILE already has are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from preflop.account import Account
from preflop.accounting import account_tape
from preflop.measure.memory import measure_steps
from preflop.measure.verify import _has_convolution, _priced_flops, counted_by_operator, oracle_wrong
from preflop.record.subject_tape import record_subject
from preflop.subject import Subject, resolve

from . import untouched
from .batches import batches
from .others import other_pairs
from .pairs import FAMILIES, Pair, transformers_pairs
from .rules import LEVELS
from .shrink import small_config, sub_configs

OUT = Path("build/sweep.jsonl")
LARGEST_REAL_PARAMETERS = 150_000_000
"""A shrunk model beyond this is not built for real."""
SECONDS_PER_PAIR = 60
OFF = 5e-3
"""Relative difference of the peaks beyond which `--again off` repeats a pair."""


@dataclass
class Row:
    """What the sweep found of one pair: a line of the output."""

    family: str
    pair: str
    status: str = ""
    """answered, failed (the real step runs, the recording raises), not built (the sweep has no small
    model and batch that run for real), does not train (the model itself says so), library missing, too
    slow, crashed."""
    reason: str = ""
    level: int = 0
    batch: str = ""
    parameters: int = 0
    record_s: float = 0.0
    predicted_bytes: int = 0
    predicted_first_bytes: int = 0
    measured_bytes: int = 0
    measured_first_bytes: int = 0
    measured_error: str = ""
    """Why the real step was not measured."""
    convolutions: bool = False
    flops: int = 0
    counted_flops: int = 0
    oracle_wrong: list[str] = field(default_factory=list)
    unknown: dict[str, int] = field(default_factory=dict)
    assumptions: list[str] = field(default_factory=list)
    peak_op: str = ""
    changed: list[str] = field(default_factory=list)
    """What recording a module that exists (not a factory) changed of it, or of the random states."""
    instance: str = ""
    """Where recording the module that exists differs from recording its factory: both peaks, or the error."""
    flops_apart: dict[str, list[int]] = field(default_factory=dict)
    """Counter's operator -> [ours, counted], where they are not equal."""
    torch_version: str = torch.__version__
    threads: int = 0

    @property
    def error(self) -> float | None:
        """The larger relative error of the two peaks, signed; None where nothing was measured."""
        if not self.measured_bytes:
            return None
        steady = self.predicted_bytes / self.measured_bytes - 1
        first = self.predicted_first_bytes / self.measured_first_bytes - 1
        return max(steady, first, key=abs)


def in_a_fork(work: Callable[[Callable[[Row], None]], None], row: Row, seconds: int) -> Row:
    """Run `work` in a fork of this process; the last row that it reported, whatever became of it.

    A fork starts at once with everything imported, and neither a crash nor a hang reaches the sweep. An
    exception from an alarm would not do: raised inside a C++ callback it ends the process.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        with os.fdopen(writing, "w") as pipe:

            def report(found: Row) -> None:
                pipe.write(json.dumps(asdict(found)) + "\n")
                pipe.flush()

            status = 1
            try:
                work(report)
                status = 0
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(status)
    os.close(writing)
    lines, ended = _read_until(reading, time.monotonic() + seconds)
    if not ended:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    found = Row(**json.loads(lines[-1])) if lines else row
    if not ended or status:
        what = f"took more than {seconds} s" if not ended else f"the process ended with status {status}"
        if found.status == "answered":
            found.measured_error = found.measured_error or what
        else:
            found.status, found.reason = "too slow" if not ended else "crashed", found.reason or what
    return found


def _read_until(reading: int, deadline: float) -> tuple[list[str], bool]:
    """Lines from a pipe until it is closed (True) or the time is up (False)."""
    data = b""
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                return data.decode().splitlines(), False
            part = pipe.read(65536)
            if not part:
                return data.decode().splitlines(), True
            data += part


@dataclass
class Candidate:
    """A small model and a batch that may fit it."""

    build: Callable[[], nn.Module]
    batch: Any
    level: int = 0
    words: str = ""


def candidates(pair: Pair) -> Iterator[Candidate]:
    """Ways to build the pair small, the smallest first."""
    import transformers

    head = getattr(transformers, pair.head)
    last: Exception | None = None
    for level in range(len(LEVELS)):
        try:
            config = _for_head(small_config(pair.model_type, level, pair.head), head)
            config.sweep_head = pair.head

            def build(config: Any = config) -> nn.Module:
                return head._from_config(config).train()

            with torch.device("meta"):
                parameters = sum(p.numel() for p in build().parameters())
            if parameters > LARGEST_REAL_PARAMETERS:
                last = last or ValueError(f"{parameters} parameters after shrinking")
                continue
            model = build()
        except Exception as error:
            last = last or error
            continue
        for words, batch in batches(pair, config, model):
            yield Candidate(build, batch, level, words)
    if last is not None:
        raise last


def _for_head(config: Any, head: Any) -> Any:
    """The part of a composite configuration that the head reads."""
    wanted = getattr(head, "config_class", None)
    if wanted is None or isinstance(config, wanted):
        return config
    for _, inner in sub_configs(config):
        if isinstance(inner, wanted):
            inner.use_cache = False
            return inner
    return config


def runs_for_real(candidate: Candidate, steps: int = 1) -> Exception | None:
    """None where so many real forwards and backwards of the candidate run; what they raise otherwise."""
    from preflop.record.loop import call_model, default_loss, trainable

    try:
        model = candidate.build()
        for _ in range(steps):
            loss = default_loss(call_model(model, candidate.batch))
            if trainable(model, loss):
                loss.backward()
    except Exception as error:
        return error
    return None


def _subject(candidate: Candidate, model: nn.Module | None = None) -> Subject:
    return resolve(model or candidate.build, lambda: candidate.batch, optimizer="adamw-loop")


def sweep_pair(pair: Any, *, measure: bool, seconds: int = SECONDS_PER_PAIR) -> Row:
    """Try one pair, in a fork of this process."""
    row = Row(pair.family, pair.name, threads=torch.get_num_threads())

    def work(report: Callable[[Row], None]) -> None:
        try_pair(pair, row, report, measure=measure)

    return in_a_fork(work, row, seconds)


def try_pair(pair: Any, row: Row, report: Callable[[Row], None], *, measure: bool) -> None:
    """Fill in the row, with the first candidate whose step runs for real, and report it as it fills."""
    first_error: Exception | None = None
    ways = candidates(pair) if isinstance(pair, Pair) else pair.candidates()
    while True:
        try:
            candidate = next(ways, None)
        except Exception as error:
            first_error, candidate = first_error or error, None
        if candidate is None:
            row.status, row.reason = "not built", _words(first_error)
            if isinstance(first_error, ImportError):
                row.status = "library missing"
            elif re.search(r"not support training|[Tt]raining is not", row.reason):
                row.status = "does not train"
            report(row)
            return
        error = runs_for_real(candidate)
        if error is None:
            _try(row, candidate, report, measure=measure)
            return
        first_error = first_error or error
        row.reason = _words(first_error)


def _try(row: Row, candidate: Candidate, report: Callable[[Row], None], *, measure: bool) -> None:
    row.level, row.batch, row.reason = candidate.level, candidate.words, ""
    subject = _subject(candidate)
    began = time.perf_counter()
    try:
        account = account_tape(record_subject(subject))
    except Exception as error:
        again = runs_for_real(candidate, steps=2)  # a model may keep the graph of its first step
        row.status, row.reason = ("failed", _words(error)) if again is None else ("does not train", _words(again))
        report(row)
        return
    row.record_s = round(time.perf_counter() - began, 2)
    _predicted(row, account)
    row.status = "answered"
    report(row)
    _try_the_instance(row, candidate)
    report(row)
    if measure:
        _measure(row, subject, _ours(account))
        report(row)


def _try_the_instance(row: Row, candidate: Candidate) -> None:
    """Record a module that exists: the same peaks as its factory's, and nothing about it changes."""
    model = candidate.build()
    before = untouched.state_of(model)
    try:
        memory = account_tape(record_subject(_subject(candidate, model))).memory
        peaks = (memory.peak_bytes, memory.first_step_peak_bytes)
        if peaks != (row.predicted_bytes, row.predicted_first_bytes):
            row.instance = f"peaks {peaks}"
    except Exception as error:
        row.instance = _words(error)
    row.changed = untouched.differences(before, untouched.state_of(model))


def _predicted(row: Row, account: Account) -> None:
    tape, memory = account.tape, account.memory
    row.parameters = sum(
        _count(p.shape) for p in {p.storage: p for p in tape.parameters}.values()
    )
    row.predicted_bytes, row.predicted_first_bytes = memory.peak_bytes, memory.first_step_peak_bytes
    row.peak_op = memory.peak_op
    row.convolutions = _has_convolution(tape)
    row.flops = _priced_flops(account)
    row.oracle_wrong = oracle_wrong(tape)
    row.unknown = dict(account.flops.unknown)
    row.assumptions = list(tape.assumptions)


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _ours(account: Account) -> dict[str, int]:
    """FLOPs of the work that FlopCounterMode means to count, by operator."""
    found: dict[str, int] = {}
    for line in account.operators:
        if line.kind in ("matmul", "attention", "convolution"):
            found[line.op] = found.get(line.op, 0) + line.flops
    return found


def _apart(ours: dict[str, int], counted: dict[str, int]) -> dict[str, list[int]]:
    """Operators whose FLOPs are not equal: [ours, counted]. Fused attention is written out when counted."""
    return {
        name: [ours.get(name, 0), counted.get(name, 0)]
        for name in sorted({*ours, *counted})
        if ours.get(name, 0) != counted.get(name, 0)
    }


def _measure(row: Row, subject: Subject, ours: dict[str, int]) -> None:
    try:
        measured = measure_steps(subject)
        row.measured_bytes, row.measured_first_bytes = (
            measured.steady_peak_bytes,
            measured.first_step_peak_bytes,
        )
        by_operator = counted_by_operator(subject)
        row.counted_flops = sum(by_operator.values())
        row.flops_apart = _apart(ours, by_operator) if row.counted_flops != row.flops else {}
    except Exception as error:
        row.measured_error = _words(error)


def _words(error: BaseException | None) -> str:
    if error is None:
        return "no candidate"
    frames = traceback.extract_tb(error.__traceback__)
    cause = error.__cause__ or error
    deepest = traceback.extract_tb(cause.__traceback__)
    where = (deepest or frames)[-1] if (deepest or frames) else None
    place = f" [{Path(where.filename).name}:{where.lineno}]" if where else ""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {' '.join(line.strip() for line in lines)[:300]}{place}"


def all_pairs() -> list[Any]:
    """transformers' pairs, then peft's and torch's own."""
    return [*transformers_pairs(), *other_pairs()]


def read_rows(out: Path) -> dict[str, Row]:
    """The last row of each pair."""
    rows: dict[str, Row] = {}
    if out.is_file():
        for line in out.read_text().splitlines():
            fields = json.loads(line)
            rows[fields["pair"]] = Row(**fields)
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sweep.run", description=__doc__)
    parser.add_argument(
        "--family", help=f"of: {', '.join(FAMILIES)}, peft, torch; several with commas between"
    )
    parser.add_argument("--only", help="pairs whose name contains this")
    parser.add_argument("--limit", type=int, help="stop after so many pairs")
    parser.add_argument("--every", type=int, default=1, help="take each Nth pair: a sample of all families")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--measure", action="store_true", help="run real steps too")
    parser.add_argument("--again", default="", help="repeat rows of this status (or 'unmeasured', 'off', 'all')")
    parser.add_argument("--write-docs", action="store_true", help="write docs/coverage.md from FILE")
    options = parser.parse_args(arguments)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    _quiet()
    if not options.write_docs or options.family or options.only or options.limit:
        _sweep(options)
    if options.write_docs:
        from .coverage import write_coverage

        write_coverage(read_rows(options.out), all_pairs())
    return 0


def _quiet() -> None:
    import logging

    logging.disable(logging.WARNING)


def _sweep(options: argparse.Namespace) -> None:
    known = read_rows(options.out)
    chosen = [
        pair
        for pair in all_pairs()
        if (options.family is None or pair.family in options.family.split(","))
        and (options.only is None or options.only.lower() in pair.name.lower())
    ][:: options.every]
    done = 0
    for pair in chosen:
        row = known.get(pair.name)
        if row is not None and not _again(row, options.again):
            continue
        if options.limit is not None and done >= options.limit:
            break
        done += 1
        found = sweep_pair(pair, measure=options.measure)
        with options.out.open("a") as lines:
            lines.write(json.dumps(asdict(found)) + "\n")
        error = found.error
        shown = "" if error is None else f" {error:+.4%}"
        print(
            f"{found.status:10} {pair.name}{shown} L{found.level} {found.record_s}s {found.batch} "
            f"{found.reason[:150]}",
            flush=True,
        )


def _again(row: Row, which: str) -> bool:
    unmeasured = row.status == "answered" and not row.measured_bytes
    off = row.error is not None and abs(row.error) > OFF
    named = {"all": True, "unmeasured": unmeasured, "off": off}
    return named.get(which, row.status == which)


if __name__ == "__main__":
    sys.exit(main())
