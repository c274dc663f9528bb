"""Kill points are exact: not one instruction past them, whatever the other threads do."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tcp_proxy import wait_until

CHILD = """
import os, threading
from headrace.worker import kill_points

def work():
    kill_points.reach("before_finish")
    os.write(1, b"went on")

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_thread_that_reaches_its_kill_point_goes_no_further() -> None:
    """A SIGSTOP sent to the process stopped its main thread, and this one a little later."""
    environment = {
        **os.environ,
        "HEADRACE_TEST_KILL_AT": "before_finish",
        "HEADRACE_TEST_KILL_SIGNAL": "STOP",
    }
    for _ in range(4):
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", CHILD], stdout=subprocess.PIPE, env=environment
        )
        try:
            wait_until(lambda child=child: state(child.pid) == "T", 60.0)
            child.send_signal(signal.SIGKILL)
            assert child.communicate()[0] == b""
        finally:
            child.kill()
            child.wait()
