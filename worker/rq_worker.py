"""RQ's view of one of our workers: the only file that knows RQ's classes.

A worker stands in RQ's books like any other, so that `rq info`, dashboards and RQ's commands see
it: birth, state, executions (our scripts write those), stop commands, death. Jobs named by others
are never imported or run here; RQ's own loop is not used.
"""

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

import orjson
import redis
from rq import Queue
from rq.job import Job
from rq.worker import BaseWorker

log = logging.getLogger(__name__)

WORKER_TTL = 120
"""Seconds after which RQ takes a silent worker for gone; our heartbeat renews it."""

StopRequest = Callable[[str, str | None], None]


class Registration:
    """Birth, life and death in RQ's books.

    `on_stop(job_id, execution_id or None)` is called from the thread that listens to RQ's command
    channel. It must be quick and may raise; nothing ends the listening but `unregister`.
    """

    def __init__(
        self,
        connect: Callable[[], redis.Redis],
        name: str,
        queues: Sequence[str],
        on_stop: StopRequest,
    ) -> None:
        self.name = name
        self._on_stop = on_stop
        self._connection = connect()
        self._listen_connection = connect()
        self._worker = BaseWorker(
            list(queues),
            name=name,
            connection=self._connection,
            serializer="json",
            worker_ttl=WORKER_TTL - 60,
        )
        self._ended = threading.Event()
        self._listening = threading.Event()
        self._listener = threading.Thread(target=self._listen, name="rq-commands", daemon=True)

    def register(self) -> None:
        """Enter the books and listen to commands, from the return of this call on."""
        self._worker.register_birth()
        self._worker.set_state("idle")
        self._listener.start()
        self._listening.wait(2.0)

    def register_again(self) -> None:
        """The entry has gone (a long stop, a Redis that came back empty): write it anew."""
        self._worker.register_birth()
        self._worker.set_state("idle")

    def unregister(self) -> None:
        """Leave the books; what was leased stays leased until it lapses or was released."""
        self._ended.set()
        self._worker.register_death()
        if self._listener.is_alive():
            self._listener.join(2.0)
        self._connection.close()
        self._listen_connection.close()

    def _listen(self) -> None:
        """Commands, for ever. A lost connection is subscribed again by the client library."""
        channel = self._worker.pubsub_channel_name
        pubsub = self._listen_connection.pubsub()  # type: ignore[no-untyped-call]
        wanted = False
        while not self._ended.is_set():
            try:
                if not wanted:
                    pubsub.subscribe(channel)
                    wanted = True
                message = pubsub.get_message(timeout=0.5)
            except (redis.exceptions.RedisError, OSError) as error:
                log.debug("command channel: %s", error)
                self._ended.wait(1.0)
                continue
            if message is not None and message["type"] == "subscribe":
                self._listening.set()
            elif message is not None:
                self._command(message.get("data"))
        with contextlib.suppress(redis.exceptions.RedisError, OSError):
            pubsub.close()

    def _command(self, data: Any) -> None:
        """RQ's commands; anything else on the channel is ignored."""
        try:
            command = orjson.loads(data)
            name, job_id = command.get("command"), command.get("job_id")
            if name in ("stop-job", "stop-execution") and isinstance(job_id, str):
                execution_id = command.get("execution_id") if name == "stop-execution" else None
                self._on_stop(job_id, execution_id)
            elif name == "shutdown":
                os.kill(os.getpid(), signal.SIGINT)
        except Exception:
            log.exception("a command on RQ's channel could not be carried out")


def enqueue_dependents(connection: redis.Redis, job_id: str) -> tuple[str, str]:
    """Move a finished job's dependents on, as RQ does. Safe to repeat.

    Returns the names of the job's success and failure callback, which are not run here ('' for
    none), success first.
    """
    raw = connection.hgetall(Job.key_for(job_id))
    if not raw:
        return "", ""
    job = Job(job_id, connection=connection, serializer="json")
    job.restore(raw)
    Queue(job.origin, connection=connection, serializer="json").enqueue_dependents(job)
    return job._success_callback_name or "", job._failure_callback_name or ""
