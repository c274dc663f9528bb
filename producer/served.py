"""Which model answers a run: one that live workers serve, or one that a local worker is to serve.

Found out before anything is started.
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from headrace.producer import keys
from headrace.producer.bulk.lines import LineParser
from headrace.producer.client import Client
from headrace.producer.connection import redacted
from headrace.producer.errors import InvalidName, RedisUnavailable
from headrace.producer.local import DEMO_MODEL, served_name
from headrace.producer.progress import say
from headrace.producer.redis_info import inspect_server
from headrace.producer.run_options import RunOptions


@dataclass(frozen=True, slots=True)
class GivenRedis:
    """A Redis that the caller named, which answers and serves our purpose."""

    url: str
    client: Client


class Served:
    """Which model answers, known before anything is started. `redis` None: a private one is to be
    started."""

    def __init__(
        self, name: str, identity: str, queue: str, local: str | None, redis: GivenRedis | None
    ) -> None:
        _check_queue(queue)
        self.name = name
        self.identity = identity
        self.queue = queue
        self.local = local
        self.redis = redis

    @classmethod
    def look(cls, options: RunOptions, stack: contextlib.ExitStack) -> "Served":
        if options.redis_url is None:
            return cls._own(options, None)
        client = stack.enter_context(contextlib.closing(Client(options.redis_url, retry_for=2.0)))
        client.ping()
        facts = inspect_server(client.redis)
        if facts.problems:
            raise RedisUnavailable(f"{redacted(options.redis_url)}: {'; '.join(facts.problems)}")
        for warning in facts.warnings:
            say(f"warning: {redacted(options.redis_url)}: {warning}\n")
        redis = GivenRedis(options.redis_url, client)
        models = {worker.model: worker.queues for worker in client.workers() if worker.model}
        wanted = options.served_model_name or (served_name(options.model) if options.model else "")
        if not wanted and len(models) == 1:
            wanted = next(iter(models))
        if options.local_worker or (options.local_worker is None and wanted not in models):
            return cls._own(options, redis)
        if not wanted:
            raise RedisUnavailable(
                "no live worker says what it serves: start one, or give --model or --local-worker"
            )
        queues = models.get(wanted, ())
        queue = options.queue or (wanted if wanted in queues or not queues else queues[0])
        return cls(wanted, wanted, queue, None, redis)

    @classmethod
    def _own(cls, options: RunOptions, redis: GivenRedis | None) -> "Served":
        model = options.model or DEMO_MODEL
        name = options.served_model_name or served_name(model)
        path = Path(model).expanduser()
        identity = str(path.resolve()) if path.exists() else model
        return cls(name, identity, options.queue or name, model, redis)

    def parser(self, options: RunOptions) -> LineParser:
        return LineParser(defaults=options.defaults, expected_model=self.name)


def _check_queue(queue: str) -> None:
    """Said once, before anything starts, and not of every line."""
    try:
        keys.check_queue(queue)
    except InvalidName as error:
        raise InvalidName(f"{error}; choose one with --queue or --served-model-name") from None
