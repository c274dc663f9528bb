"""Keeps this pod's `controller.kubernetes.io/pod-deletion-cost`, so that scaling down takes an idle
pod before a busy or loading one. Knows no queue and no engine.

Kubernetes compares the costs of a ReplicaSet's pods and removes the lowest first
(kubernetes/kubernetes#45509). The annotation is a hint on a best-effort basis, and each patch costs
the API server a write: so only changes of the coarse level are sent, at most every 30 s.
"""

import json
import logging
import os
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from headrace.worker.source import WorkerState

log = logging.getLogger(__name__)

ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
LOADING_COST = 10_000
DRAINING_COST = -1


def cost_of(state: WorkerState, running: int) -> int:
    """Draining below idle, idle below busy, busy by powers of two, loading above all: what a
    loading pod has paid for its start would be paid again."""
    if state is WorkerState.DRAINING:
        return DRAINING_COST
    if state is WorkerState.LOADING:
        return LOADING_COST
    return 1 << (running - 1).bit_length() if running > 0 else 0


class PodApi:
    """Patches one pod's annotations through the API server, as its service account."""

    def __init__(self, url: str, namespace: str, pod: str, account: Path = ACCOUNT) -> None:
        self._target = f"{url}/api/v1/namespaces/{namespace}/pods/{pod}"
        self._account = account

    @classmethod
    def from_environment(cls) -> "PodApi | None":
        """None where this process runs in no pod, or may not ask."""
        host = os.environ.get("KUBERNETES_SERVICE_HOST")
        pod, namespace = os.environ.get("POD_NAME"), os.environ.get("POD_NAMESPACE")
        if not host or not pod or not (ACCOUNT / "token").exists():
            return None
        port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if namespace is None:
            namespace = (ACCOUNT / "namespace").read_text().strip()
        address = f"[{host}]" if ":" in host else host
        return cls(f"https://{address}:{port}", namespace, pod)

    def patch(self, cost: int) -> None:
        """Raises OSError when the API server refuses or is away."""
        body = {"metadata": {"annotations": {ANNOTATION: str(cost)}}}
        # Read each time: the token is renewed on disk.
        token = (self._account / "token").read_text().strip()
        request = urllib.request.Request(
            self._target,
            data=json.dumps(body).encode(),
            method="PATCH",
            headers={
                "Authorization": f"Bearer {token}",
                "Content-Type": "application/merge-patch+json",
            },
        )
        authority = self._account / "ca.crt"
        context = None
        if self._target.startswith("https:"):
            context = ssl.create_default_context(
                cafile=str(authority) if authority.exists() else None
            )
        with urllib.request.urlopen(request, timeout=5.0, context=context) as answer:
            answer.read()


class DeletionCost:
    """Follows `level()` in a thread. A refusal is logged once and tried again later."""

    def __init__(
        self, api: PodApi, level: Callable[[], int], *, interval: float = 30.0, poll: float = 1.0
    ) -> None:
        self._api = api
        self._level = level
        self._interval = interval
        self._poll = poll
        self._told: int | None = None
        self._refused = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="deletion-cost", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        next_patch = 0.0
        while not self._stopped.wait(self._poll):
            cost = self._level()
            if cost == self._told or time.monotonic() < next_patch:
                continue
            next_patch = time.monotonic() + self._interval
            try:
                self._api.patch(cost)
            except (urllib.error.URLError, OSError) as error:
                if not self._refused:
                    log.warning("cannot set the pod's deletion cost: %s", error)
                self._refused = True
            else:
                self._told, self._refused = cost, False
