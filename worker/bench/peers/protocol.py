"""How the benchmark talks to a system: a child process that loads once and runs when told.

The child prints one JSON line when it is ready and one for each `run` that it reads from stdin.
Standard library only: a peer's environment holds the peer and nothing of ours.
"""

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO


@dataclass(frozen=True)
class PeerRequest:
    id: int
    prompt_token_ids: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Options:
    """What every system is told. `dtype`: float32, bfloat16 or a quantization of the system's."""

    model: str
    workload: str
    dtype: str
    threads: int
    extra: dict[str, str] = field(default_factory=dict)

    def requests(self) -> list[PeerRequest]:
        with Path(self.workload).open(encoding="utf-8") as file:
            return [PeerRequest(**json.loads(line)) for line in file]


@dataclass(frozen=True)
class Run:
    """One run over the whole workload. Seconds from the first submit to the last token.
    `peak_rss_bytes` where the work is done by another process than this one."""

    seconds: float
    token_ids: list[list[int]]
    first_token_seconds: float | None = None
    details: dict[str, object] = field(default_factory=dict)
    peak_rss_bytes: int | None = None


def fast_float() -> str:
    """What is multiplied fastest on this processor: bfloat16 where it has instructions for it."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:
        flags = []
    return "bfloat16" if {"avx512_bf16", "amx_bf16"} & set(flags) else "float32"


def options() -> Options:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    args = parser.parse_args()
    extra = dict(item.split("=", 1) for item in args.set)
    return Options(args.model, args.workload, args.dtype, args.threads, extra)


Runner = Callable[[list[PeerRequest]], Run]
"""Empties the system's caches, then answers the requests."""


def serve(load: Callable[[Options], tuple[str, Runner]]) -> None:
    """Load, say so, then run on demand until stdin closes.

    `load` returns the system's version and what runs it. `warm` on stdin runs a few requests with
    few tokens, `run` the whole workload. Standard output is the protocol's: what the system prints
    goes to stderr.
    """
    chosen = options()
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    started = time.perf_counter()
    version, run = load(chosen)
    _say(channel, event="ready", version=version, load_seconds=time.perf_counter() - started)
    requests = chosen.requests()
    few = [PeerRequest(r.id, r.prompt_token_ids, min(r.max_tokens, 4)) for r in requests[:4]]
    for line in sys.stdin:
        done = run(few if line.strip() == "warm" else requests)
        _say(
            channel,
            event="done",
            seconds=done.seconds,
            first_token_seconds=done.first_token_seconds,
            token_ids=done.token_ids,
            details=done.details,
            peak_rss_bytes=done.peak_rss_bytes or _peak_rss(),
        )


def _peak_rss() -> int:
    """This process's peak and that of its largest finished child, in bytes."""
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) * 1024


def _say(channel: TextIO, **values: object) -> None:
    channel.write(json.dumps(values) + "\n")
    channel.flush()
