"""Runs training in forked children that are killed at a chosen moment: no child imports torch anew.

Reads one JSON request a line on standard input, answers with one line each. Started once per session of
tests; it computes nothing itself, so that its children begin with a clean, single-threaded torch.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback

import torch

from preflop.errors import PreflopError
from preflop.trainer.config import make_config
from preflop.trainer.display import Lines
from preflop.trainer.loop import train


def child(request: dict) -> int:
    """Train as the request says; killed at the moment of that number, else the moments are reported."""
    moments: list[str] = []
    kill_at = request.get("kill_at")
    signal_number = getattr(signal, request.get("signal", "SIGKILL"))

    def observe(moment: str, step: int, microbatch: int) -> None:
        moments.append(f"{moment}:{step}:{microbatch}")
        if len(moments) == kill_at or moments[-1] == kill_at:
            os.kill(os.getpid(), signal_number)

    with open(request["log"], "a", encoding="utf-8") as log:
        try:
            train(
                make_config(request["config"]),
                resume=request.get("resume", False),
                price=False,
                display=Lines(log),
                observe=observe,
            )
        except PreflopError as error:
            log.write(f"ERROR {type(error).__name__}: {error}\n")
            return 2
    with open(request["log"] + ".moments", "w", encoding="utf-8") as stream:
        json.dump(moments, stream)
    return 0


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            status = 3
            try:
                status = child(request)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"status": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    main()
