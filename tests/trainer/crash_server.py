"""Runs training in forked children that are killed at a chosen moment: no child imports torch anew.

Reads one JSON request a line on standard input, answers with one line each. Started once per session of
tests; it computes nothing itself, so that its children begin with a clean, single-threaded torch.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
import traceback

import torch
import torch._dynamo  # optimizers import it: once here, and not in every child

from preflop.errors import PreflopError
from preflop.trainer.config import make_config
from preflop.trainer.display import Lines
from preflop.trainer.loop import train


def child(request: dict) -> int:
    """Train as the request says; killed at the moment of that number, else the moments are reported."""
    moments: list[str] = []
    kill_at = request.get("kill_at")
    kill_after = request.get("kill_after")
    if "largest_file_bytes" in request:  # a disk that is full, as far as large files go
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["largest_file_bytes"],) * 2)
    if request.get("obey_permissions"):
        obey_permissions()
    signal_number = getattr(signal, request.get("signal", "SIGKILL"))

    def observe(moment: str, step: int, microbatch: int) -> None:
        moments.append(f"{moment}:{step}:{microbatch}")
        if len(moments) == kill_at or moments[-1] == kill_at:
            os.kill(os.getpid(), signal_number)
        if kill_after and moments[-1] == kill_after[0]:
            threading.Thread(target=kill_later, args=(kill_after[1],), daemon=True).start()

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


def kill_later(seconds: float) -> None:
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def obey_permissions() -> None:
    """Drop root's right to write where permissions forbid it (capset(2), header version 3)."""
    header = struct.pack("Ii", 0x20080522, 0)
    ctypes.CDLL(None, use_errno=True).capset(header, bytes(24))


def start(request: dict, rank: int, port: int) -> int:
    """Fork one process of the run; its id."""
    pid = os.fork()
    if pid:
        return pid
    ranks = request.get("ranks", 1)
    if ranks > 1:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(ranks),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
    status = 3
    try:
        status = child(request)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        port = free_port()
        pids = [start(request, rank, port) for rank in range(request.get("ranks", 1))]
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps({"status": next((one for one in statuses if one), 0)}), flush=True)


if __name__ == "__main__":
    main()
