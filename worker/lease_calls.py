"""Sends the worker's scripts and commands to Redis. What can't be sent is SourceUnavailable.

Knows how a call is sent and repeated, not what any of them means.
"""

import logging
from collections.abc import Callable
from typing import Any, Final

import redis

from headrace.producer import connection, operations, scripts
from headrace.producer.blobs import BlobStore, perform
from headrace.producer.errors import RedisUnavailable
from headrace.worker.source import SourceUnavailable

log = logging.getLogger(__name__)

SCRIPTS: Final = ("claim", "heartbeat", "finish", "release", "reap", "checkpoint")


class LeaseCalls:
    """`clock` gives what replaces Redis' own in a script: tests only, else empty."""

    def __init__(
        self, client: redis.Redis, clock: Callable[[], str], blobs: BlobStore | None
    ) -> None:
        self.scripts = {name: scripts.load("headrace.worker", name) for name in SCRIPTS}
        self._redis = client
        self._clock = clock
        self._blobs = blobs

    def script(self, name: str, key: str, *args: scripts.Argument) -> Any:
        """Run one of the worker's own scripts."""
        return self.evaluate(self.scripts[name], key, *args)

    def evaluate(self, script: scripts.Script, key: str, *args: scripts.Argument) -> Any:
        return self.send(scripts.Eval(script, (key,), (self._clock(), *args)))

    def send(self, call: scripts.RedisCall) -> Any:
        try:
            return connection.send(self._redis, call, retry_for=0.5)
        except RedisUnavailable as error:
            raise SourceUnavailable(str(error)) from error

    def run(self, steps: operations.Steps[Any]) -> Any:
        try:
            call = next(steps)
            while True:
                if isinstance(call, scripts.BlobCall):
                    call = steps.send(perform(self._blobs, call))
                else:
                    call = steps.send(self.send(call))
        except StopIteration as done:
            return done.value

    def guard(self, action: Callable[[], object]) -> None:
        """Something that others will do if we can't."""
        try:
            action()
        except (redis.exceptions.RedisError, OSError) as error:
            if connection.is_transient(error):
                raise SourceUnavailable(str(connection.unavailable(error))) from error
            log.warning("%s", error)
