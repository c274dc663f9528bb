"""Run one command that must not outlive its parent.

`python -I -S guard.py PARENT_PID REMOVE -- COMMAND...`. Our parent holds the write end of our
standard input and never writes. When it dies, by whatever signal, the pipe closes (or, where a
forked copy of the parent still holds it, our parent process id changes), and the command's process
group gets SIGTERM, then SIGKILL. Should this guard itself be killed, PR_SET_PDEATHSIG takes the
command along on Linux; that is set here and not in the parent because the kernel ties it to the
*thread* that forked, and this process has only one. SIGTERM and SIGINT are passed on. REMOVE is a
folder to delete when the parent is gone, or "". The exit status is the command's, or 128 + signal.
Standard library only: it runs as a file, without site-packages.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import sys
import time

_PR_SET_PDEATHSIG = 1
GRACE_SECONDS = 2.5
_POLL_SECONDS = 0.5


def _die_with_parent(libc: ctypes.CDLL | None, parent: int) -> None:
    if libc is not None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)


def _spawn(command: list[str]) -> int:
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            os.setpgid(0, 0)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            _die_with_parent(libc, guard)
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            os.execvp(command[0], command)
        except OSError as error:
            os.write(2, f"cannot run {command[0]}: {error}\n".encode())
        os._exit(127)
    with contextlib.suppress(OSError):
        os.setpgid(child, child)
    return child


def _signal_group(child: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, number)


def _is_gone(parent: int, patience: float = 2.0) -> bool:
    """Whether `parent` has ended. A process that is killed closes its pipes a moment before its
    children get another parent, on a busy machine a long one; while it lives, the pipe is open,
    unless it has lost patience with us."""
    if not select.select([0], [], [], 0)[0]:
        return os.getppid() != parent
    end = time.monotonic() + patience
    while os.getppid() == parent:
        if time.monotonic() >= end:
            return False
        time.sleep(0.02)
    return True


def run(parent: int, command: list[str]) -> int:
    """Run `command` until it ends, and at most until `parent` does; the exit status."""
    wake_read, wake_write = os.pipe()
    for end in (wake_read, wake_write):
        os.set_blocking(end, False)
    pending: list[int] = []
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, _: pending.append(got))
    child = _spawn(command)
    watched = [0, wake_read]
    kill_at: float | None = None
    while True:
        ready, _, _ = select.select(watched, [], [], _POLL_SECONDS)
        if wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake_read, 512)
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            _signal_group(child, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(status)
            return 128 - code if code < 0 else code
        while pending:
            _signal_group(child, pending.pop())
        parent_gone = os.getppid() != parent or (0 in ready and os.read(0, 1) == b"")
        if parent_gone and kill_at is None:
            watched = [wake_read]
            kill_at = time.monotonic() + GRACE_SECONDS
            _signal_group(child, signal.SIGTERM)
        if kill_at is not None and time.monotonic() >= kill_at:
            _signal_group(child, signal.SIGKILL)


if __name__ == "__main__":
    _parent, _remove, _separator, *_command = sys.argv[1:]
    _code = run(int(_parent), _command)
    if _remove and _is_gone(int(_parent)):
        shutil.rmtree(_remove, ignore_errors=True)
    sys.exit(_code)
