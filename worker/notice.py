"""Notices that this machine will be taken away: a file that appears, or a cloud's metadata URL.

Polled from a thread of its own. Knows nothing of what is done about it.
"""

import json
import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)

PRESETS = {
    "aws": "http://169.254.169.254/latest/meta-data/spot/instance-action",
    "gcp": "http://metadata.google.internal/computeMetadata/v1/instance/preempted",
    "azure": "http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01",
}
"""Where each cloud says it: AWS answers 404 until there is a notice, Google TRUE or FALSE, Azure a
list of events."""

_NOT_YET = {"", "false", "none", "null", "0"}


def is_notice(body: str) -> bool:
    """Whether an answer of status 200 is a notice. Azure's other events (reboot) are none."""
    text = body.strip()
    if text.lower() in _NOT_YET:
        return False
    try:
        document = json.loads(text)
    except ValueError:
        return True
    if isinstance(document, dict) and "Events" in document:
        events = document["Events"] or []
        return any(e.get("EventType") in ("Preempt", "Terminate") for e in events)
    return bool(document)


def read_notice(source: str, timeout: float = 1.0) -> bool:
    """Ask once. A source that cannot be reached is no notice (and is not logged each time)."""
    target = PRESETS.get(source, source)
    if not target.startswith(("http://", "https://")):
        return Path(target.removeprefix("file://")).exists()
    headers = {"Metadata-Flavor": "Google", "Metadata": "true"}
    try:
        if source == "aws":
            headers["X-aws-ec2-metadata-token"] = _aws_token(timeout)
        request = urllib.request.Request(target, headers=headers)
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return is_notice(answer.read(65536).decode("utf-8", "replace"))
    except (urllib.error.URLError, OSError, ValueError):
        return False


def _aws_token(timeout: float) -> str:
    request = urllib.request.Request(
        "http://169.254.169.254/latest/api/token",
        method="PUT",
        headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"},
    )
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        token: str = answer.read(4096).decode()
        return token


class NoticeWatch:
    """Polls `source` every `interval` seconds and calls `on_notice` once."""

    def __init__(self, source: str, on_notice: Callable[[], None], interval: float = 2.0) -> None:
        self._source = source
        self._on_notice = on_notice
        self._interval = interval
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="notice", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            if read_notice(self._source):
                self._on_notice()
                return
