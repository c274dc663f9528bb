"""Connections to Redis, and the one loop that sends a call until it is answered.

`connect` takes `redis://`, `rediss://`, `unix://` and
`redis+sentinel://[user:password@]host:port[,host:port...]/SERVICE[/DB]`. Every call that goes
through here may be sent twice, so a lost reply, a restart, a fail-over or a replica that has just
been demoted is answered by sending again, for `retry_for` seconds. Nothing here knows jobs.
"""

import asyncio
import random
import time
from collections.abc import Iterator
from typing import Any, Protocol
from urllib.parse import parse_qs, unquote, urlsplit

import redis
import redis.asyncio
from redis.backoff import NoBackoff
from redis.retry import Retry

from headrace.producer.errors import QueueFull, RedisUnavailable
from headrace.producer.scripts import Block, Commands, Eval, Pause, RedisCall

RETRY_FOR = 30.0
BLOCK_SLACK = 5.0

TRANSIENT: tuple[type[Exception], ...] = (
    redis.exceptions.ConnectionError,
    redis.exceptions.TimeoutError,
    redis.exceptions.ReadOnlyError,
    ConnectionError,
    TimeoutError,
)
FATAL: tuple[type[Exception], ...] = (
    redis.exceptions.AuthenticationError,
    redis.exceptions.AuthorizationError,
)


class RedisClient(Protocol):
    """The part of `redis.Redis` that is used here."""

    def execute_command(self, *args: Any, **options: Any) -> Any: ...

    def pipeline(self, transaction: bool = True) -> Any: ...

    def close(self) -> None: ...


def options(socket_timeout: float) -> dict[str, Any]:
    """Connection settings: no retries below ours, keep-alive, and a bound on every wait."""
    return {
        "socket_timeout": socket_timeout,
        "socket_connect_timeout": min(socket_timeout, 5.0),
        "socket_keepalive": True,
        "health_check_interval": 30,
        "retry": Retry(NoBackoff(), 0),
    }


def connect(url: str, socket_timeout: float = 30.0) -> redis.Redis:
    """A client for a URL. Nothing is sent yet. RedisUnavailable for a URL that can't be used."""
    if url.startswith("redis+sentinel://"):
        return _sentinel(url, socket_timeout)
    try:
        settings = options(socket_timeout)
        if url.startswith("unix://"):
            # Options of TCP sockets, which redis-py's unix connection refuses.
            del settings["socket_keepalive"], settings["socket_connect_timeout"]
        return redis.Redis.from_url(url, **settings)
    except ValueError as error:
        raise RedisUnavailable(
            f"{redacted(url)} is no Redis URL ({error}); use redis://, rediss://, unix:// or "
            "redis+sentinel://"
        ) from error


def connect_async(url: str, socket_timeout: float = 30.0) -> "redis.asyncio.Redis":
    """As `connect`, for asyncio."""
    from redis.asyncio.retry import Retry as AsyncRetry

    settings = {**options(socket_timeout), "retry": AsyncRetry(NoBackoff(), 0)}
    if url.startswith("redis+sentinel://"):
        from redis.asyncio.sentinel import Sentinel

        addresses, service, own = sentinel_parts(url)
        quick = {"socket_timeout": 2.0, "socket_connect_timeout": 2.0}
        sentinel = Sentinel(addresses, sentinel_kwargs=quick)  # type: ignore[no-untyped-call]
        found: redis.asyncio.Redis = sentinel.master_for(service, **own, **settings)
        return found
    try:
        return redis.asyncio.Redis.from_url(url, **settings)
    except ValueError as error:
        raise RedisUnavailable(f"{redacted(url)} is no Redis URL ({error})") from error


def sentinel_parts(url: str) -> tuple[list[tuple[str, int]], str, dict[str, Any]]:
    """Sentinels' addresses, the service's name and connection settings of a sentinel URL."""
    parts = urlsplit(url)
    login, _, hosts = parts.netloc.rpartition("@")
    path = [unquote(p) for p in parts.path.split("/") if p]
    if not hosts or not path:
        raise RedisUnavailable(
            "a sentinel URL is redis+sentinel://[user:password@]host:port[,host:port]/SERVICE[/DB]"
        )
    addresses = []
    for address in hosts.split(","):
        host, _, port = address.rpartition(":")
        addresses.append((host or port, int(port) if host else 26379))
    settings: dict[str, Any] = {"db": int(path[1]) if len(path) > 1 else 0}
    if login:
        user, _, password = login.rpartition(":")
        settings["username"] = unquote(user) or None
        settings["password"] = unquote(password)
    query = parse_qs(parts.query)
    if query.get("ssl", ["0"])[0] in ("1", "true"):
        settings["ssl"] = True
    return addresses, path[0], settings


def _sentinel(url: str, socket_timeout: float) -> redis.Redis:
    from redis.sentinel import Sentinel

    addresses, service, settings = sentinel_parts(url)
    common = options(socket_timeout)
    quick = {"socket_timeout": 2.0, "socket_connect_timeout": 2.0}
    sentinel = Sentinel(addresses, sentinel_kwargs=quick)  # type: ignore[no-untyped-call]
    client: redis.Redis = sentinel.master_for(service, **settings, **common)  # type: ignore[no-untyped-call]
    return client


def redacted(url: str) -> str:
    """The URL without its password."""
    parts = urlsplit(url)
    login, at, hosts = parts.netloc.rpartition("@")
    if not at or ":" not in login:
        return url
    return url.replace(parts.netloc, f"{login.partition(':')[0]}:***@{hosts}", 1)


class Patience:
    """How long to go on sending: exponential back-off with jitter, 0.05 to 2 s, until `seconds`
    have passed since the first failure."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: float | None = None
        self._delay = 0.05

    def next_delay(self, error: Exception) -> float:
        """Seconds to wait before sending again; raises RedisUnavailable when patience ends."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        delay = self._delay * random.uniform(0.5, 1.0)
        if isinstance(error, FATAL) or now + delay - self._since > self._seconds:
            raise unavailable(error) from error
        self._delay = min(self._delay * 2, 2.0)
        return delay


def unavailable(error: Exception) -> RedisUnavailable:
    if isinstance(error, FATAL):
        return RedisUnavailable(f"Redis refused the login: {error}; check user and password")
    return RedisUnavailable(
        f"Redis does not answer ({error}); check that it runs and the URL is right"
    )


def is_full(error: Exception) -> bool:
    """Redis' own refusal because its memory is full."""
    # Redis 6.2 wraps what a script met in words of its own.
    return "OOM command not allowed" in str(error) or isinstance(
        error, redis.exceptions.OutOfMemoryError
    )


def is_transient(error: Exception) -> bool:
    """An answer that another try may change, a script's demoted master among them."""
    if isinstance(error, FATAL):
        return False
    if isinstance(error, TRANSIENT):
        return True
    text = str(error)
    return isinstance(error, redis.exceptions.ResponseError) and (
        "READONLY" in text
        or "MASTERDOWN" in text
        or "LOADING" in text
        or text.startswith("UNBLOCKED")
    )


def translate(error: Exception) -> Exception:
    """What to raise for an error that another try can't change."""
    if is_full(error):
        return QueueFull(
            "Redis' memory is full (maxmemory, noeviction): wait for workers, forget old results, "
            "or give Redis more memory"
        )
    if isinstance(error, FATAL):
        return unavailable(error)
    if isinstance(error, redis.exceptions.NoPermissionError):
        return RedisUnavailable(f"the Redis user may not do this: {error}")
    return error


def send(client: RedisClient, call: RedisCall, retry_for: float = RETRY_FOR) -> Any:
    """The reply to one call."""
    if isinstance(call, Pause):
        time.sleep(call.seconds)
        return None
    patience = Patience(retry_for)
    while True:
        try:
            return _send_once(client, call)
        except redis.exceptions.RedisError as error:
            if not is_transient(error):
                raise translate(error) from error
            time.sleep(patience.next_delay(error))


async def send_async(client: Any, call: RedisCall, retry_for: float = RETRY_FOR) -> Any:
    """As `send`, for asyncio."""
    if isinstance(call, Pause):
        await asyncio.sleep(call.seconds)
        return None
    patience = Patience(retry_for)
    while True:
        try:
            return await _send_once_async(client, call)
        except redis.exceptions.RedisError as error:
            if not is_transient(error):
                raise translate(error) from error
            await asyncio.sleep(patience.next_delay(error))


async def _send_once_async(client: Any, call: RedisCall) -> Any:
    if isinstance(call, Eval):
        tail = (len(call.keys), *call.keys, *call.args)
        try:
            return await client.execute_command("EVALSHA", call.script.sha, *tail)
        except redis.exceptions.NoScriptError:
            return await client.execute_command("EVAL", call.script.text, *tail)
    if isinstance(call, Commands):
        pipeline = client.pipeline(transaction=False)
        for command in call.commands:
            pipeline.execute_command(*command)
        return await pipeline.execute()
    assert isinstance(call, Block)
    return await client.execute_command(*call.command)


def _send_once(client: RedisClient, call: RedisCall) -> Any:
    if isinstance(call, Eval):
        tail = (len(call.keys), *call.keys, *call.args)
        try:
            return client.execute_command("EVALSHA", call.script.sha, *tail)
        except redis.exceptions.NoScriptError:
            return client.execute_command("EVAL", call.script.text, *tail)
    if isinstance(call, Commands):
        pipeline = client.pipeline(transaction=False)
        for command in call.commands:
            pipeline.execute_command(*command)
        return pipeline.execute()
    assert isinstance(call, Block)
    return client.execute_command(*call.command)


def chunks(items: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
