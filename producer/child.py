"""Start and end child processes that must not outlive this one (see `guard`)."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from headrace.producer import guard


def spawn_guarded(
    command: list[str],
    *,
    remove: str = "",
    environment: Mapping[str, str] | None = None,
    output: Path | int | None = None,
) -> "subprocess.Popen[bytes]":
    """Start `command` under `guard`, so that it ends with this process.

    `output`: a file to append its output to, a file descriptor, or None to share ours. It runs in
    a session of its own: Ctrl-C in the terminal reaches only us.
    """
    guarded = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), remove, "--"]
    with contextlib.ExitStack() as stack:
        sink: int | None
        if isinstance(output, Path):
            sink = stack.enter_context(output.open("ab")).fileno()
        else:
            sink = output
        return subprocess.Popen(
            [*guarded, *command],
            stdin=subprocess.PIPE,
            stdout=sink,
            stderr=sink,
            env=dict(environment) if environment is not None else None,
            start_new_session=True,
        )


def end_guarded(process: "subprocess.Popen[bytes]", *, grace: float) -> int:
    """SIGTERM, then after `grace` seconds the guard's own escalation; the exit status."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace)
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    try:
        return process.wait(guard.GRACE_SECONDS + 2)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
