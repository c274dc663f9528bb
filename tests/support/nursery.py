"""Many worker processes for the price of one import.

`Nursery` keeps a process that has imported torch and everything of ours but has computed nothing,
and forks a worker from it: from the command line on it is what an operator starts, in a third of
the time. Each may be killed, stopped and waited for like any process.

Run as a program it is that process: one JSON object a line on stdin starts a worker, each start and
each end is a line on stdout. When stdin ends it kills what is left.
"""

import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any


class ForkedProcess:
    """The part of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = threading.Event()

    def ended(self, status: int) -> None:
        self.returncode = status
        self._ended.set()

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(["worker"], timeout or 0.0)
        assert self.returncode is not None
        return self.returncode


class Nursery:
    """Thread-safe. `fork` takes the worker's arguments; its output goes to `log`."""

    def __init__(self) -> None:
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")},
            "PYTHONSAFEPATH": "1",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        self._mother = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self._born: queue.Queue[int] = queue.Queue()
        self._children: dict[int, ForkedProcess] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    def fork(self, arguments: list[str], log: Path, **environment: str) -> ForkedProcess:
        with self._lock:
            assert self._mother.stdin is not None
            log.touch()
            order = {"arguments": arguments, "log": str(log), "environment": environment}
            self._mother.stdin.write(json.dumps(order) + "\n")
            self._mother.stdin.flush()
            return self._children[self._born.get(timeout=120)]

    def close(self) -> None:
        assert self._mother.stdin is not None
        self._mother.stdin.close()
        self._mother.wait(30)

    def _listen(self) -> None:
        assert self._mother.stdout is not None
        for line in self._mother.stdout:
            told = json.loads(line)
            if "started" in told:
                self._children[told["started"]] = ForkedProcess(told["started"])
                self._born.put(told["started"])
            else:
                self._children.pop(told["ended"]).ended(told["status"])


def _say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def _become_worker(order: dict[str, Any], run: Callable[[list[str]], Any]) -> None:
    for name, value in order["environment"].items():
        os.environ[name] = value
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    status = 70
    try:
        run(order["arguments"])
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _serve() -> None:
    from headrace.engine import engine, models, runner, tokenizer  # noqa: F401
    from headrace.worker import cli, kill_points, lease, process  # noqa: F401

    def run(arguments: list[str]) -> None:
        kill_points.arm()
        cli.worker(arguments)

    # A child's end wakes the wait for orders.
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    os.set_blocking(0, False)
    waiting = selectors.DefaultSelector()
    waiting.register(0, selectors.EVENT_READ)
    waiting.register(wake_read, selectors.EVENT_READ)
    children: set[int] = set()
    text = b""
    while True:
        for key, _ in waiting.select():
            data = os.read(key.fd, 65536)
            if key.fd == wake_read:
                continue
            if not data:
                for pid in children:
                    os.kill(pid, signal.SIGKILL)
                return
            text += data
        while b"\n" in text:
            line, _, text = text.partition(b"\n")
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _become_worker(json.loads(line), run)
            children.add(pid)
            _say(started=pid)
        for pid in list(children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                children.discard(pid)
                _say(ended=pid, status=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    _serve()
