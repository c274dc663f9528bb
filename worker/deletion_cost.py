"""Keeps this pod's `controller.kubernetes.io/pod-deletion-cost`, so that scaling down takes an idle
pod before a busy or loading one. Knows no queue and no engine.

Kubernetes compares the costs of a ReplicaSet's pods and removes the lowest first
(kubernetes/kubernetes#45509). The annotation is a hint on a best-effort basis, and each patch costs
the API server a write: so only changes of the coarse level are sent, at most every 30 s.
"""

import logging
import os
import threading
import time
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


class CannotPatch(Exception):
    """The pod's annotation cannot be set: what was wrong, and what to do."""


class PodApi:
    """Patches one pod's annotations through the API server, as its service account.

    The official client reads address, certificate and token of the pod, and the token again when
    it is renewed on disk. Imported here alone: it takes 0.3 s and 40 MB.
    """

    def __init__(self, namespace: str, pod: str, account: Path = ACCOUNT) -> None:
        """Raises CannotPatch outside a pod, without a token, and where the client is missing."""
        try:
            from kubernetes import client
            from kubernetes.config import ConfigException
            from kubernetes.config.incluster_config import InClusterConfigLoader
        except ImportError as error:
            raise CannotPatch(
                f"needs the package {error.name}: pip install 'headrace[kubernetes]'"
            ) from error
        settings = client.Configuration()
        loader = InClusterConfigLoader(str(account / "token"), str(account / "ca.crt"))
        try:
            loader.load_and_set(settings)
        except ConfigException as error:
            raise CannotPatch(f"needs a pod with a service-account token: {error}") from error
        self._api = client.CoreV1Api(client.ApiClient(settings))
        self._pod, self._namespace = pod, namespace

    @classmethod
    def from_environment(cls, account: Path = ACCOUNT) -> "PodApi":
        """The pod that POD_NAME and POD_NAMESPACE name. Raises CannotPatch."""
        pod, namespace = os.environ.get("POD_NAME"), os.environ.get("POD_NAMESPACE")
        if not pod:
            raise CannotPatch("needs the environment variable POD_NAME (the downward API's)")
        if namespace is None:
            try:
                namespace = (account / "namespace").read_text().strip()
            except OSError as error:
                raise CannotPatch(f"needs a pod with a service-account token: {error}") from error
        return cls(namespace, pod, account)

    def patch(self, cost: int) -> None:
        """Raises CannotPatch when the API server refuses or is away."""
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        body = {"metadata": {"annotations": {ANNOTATION: str(cost)}}}
        try:
            self._api.patch_namespaced_pod(self._pod, self._namespace, body, _request_timeout=5)
        except ApiException as error:
            raise CannotPatch(f"the API server answered {error.status} {error.reason}") from error
        except (HTTPError, OSError) as error:
            raise CannotPatch(str(error)) from error


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
            except CannotPatch as error:
                if not self._refused:
                    log.warning("cannot set the pod's deletion cost: %s", error)
                self._refused = True
            else:
                self._told, self._refused = cost, False
