"""Connections to Redis, and the one loop that sends a call until it is answered.

`connect` takes `redis://`, `rediss://`, `unix://` and what `sentinel` reads. Every call that goes
through here may be sent twice, so a lost reply, a restart, a fail-over or a replica that has just
been demoted is answered by sending again, for `retry_for` seconds. Nothing here knows jobs.
"""

import asyncio
import contextlib
import random
import re
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import redis
import redis.asyncio
from redis.backoff import NoBackoff
from redis.retry import Retry

from headrace.producer import sentinel
from headrace.producer.errors import QueueFull, RedisUnavailable
from headrace.producer.scripts import Block, Commands, Eval, Pause, RedisCall

C = TypeVar("C", redis.Redis, redis.asyncio.Redis)

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

REFUSALS = ("READONLY", "MASTERDOWN", "LOADING", "MISCONF", "NOREPLICAS", "BUSY ")
"""Answers that change without us: a replica or a master that starts, a disk that is full, too few
replicas, another's endless script. Scripts wrap them in words of their own."""


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
    settings = _settings(url, socket_timeout)
    with _refusing(url):
        if url.startswith(sentinel.SCHEMES):
            return _checked(sentinel.parse(url).client(**settings))
        return _checked(redis.Redis.from_url(url, **settings))


def connect_async(url: str, socket_timeout: float = 30.0) -> "redis.asyncio.Redis":
    """As `connect`, for asyncio."""
    from redis.asyncio.retry import Retry as AsyncRetry

    settings = {**_settings(url, socket_timeout), "retry": AsyncRetry(NoBackoff(), 0)}
    with _refusing(url):
        if url.startswith(sentinel.SCHEMES):
            return _checked(sentinel.parse(url).async_client(**settings))
        return _checked(redis.asyncio.Redis.from_url(url, **settings))


def _settings(url: str, socket_timeout: float) -> dict[str, Any]:
    settings = options(socket_timeout)
    if url.startswith("unix://"):
        # Options of TCP sockets, which redis-py's unix connection refuses.
        del settings["socket_keepalive"], settings["socket_connect_timeout"]
    return settings


@contextlib.contextmanager
def _refusing(url: str) -> Iterator[None]:
    """What redis-py raises for a URL that it can't use, in our words."""
    try:
        yield
    except (ValueError, TypeError, redis.exceptions.RedisError) as error:
        raise RedisUnavailable(
            f"{redacted(url)} is no Redis URL ({error}); use redis://, rediss://, unix:// or "
            "redis+sentinel://"
        ) from error


def reads_bytes(client: C) -> C:
    """The client, unless it turns every answer into text, which packed jobs are not."""
    pool: Any = getattr(client, "connection_pool")  # noqa: B009 (redis and redis.asyncio alike)
    if pool.connection_kwargs.get("decode_responses"):
        raise RedisUnavailable(
            "decode_responses is on, and jobs are no text: give Headrace a connection without it"
        )
    return client


_FILES = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")


def _checked(client: C) -> C:
    """The client, after making a connection that connects to nothing: an option that redis-py does
    not know, or a certificate that is not there, is said now and not at the first call."""
    pool: Any = getattr(client, "connection_pool")  # noqa: B009 (redis and redis.asyncio alike)
    pool.connection_class(**pool.connection_kwargs)
    reads_bytes(client)
    for name in _FILES:
        path = pool.connection_kwargs.get(name)
        if path is not None and not Path(path).exists():
            raise ValueError(f"{name}: there is no {path}")
    return client


_SECRET = re.compile(r"([?&](?:sentinel_|ssl_)?password=)[^&]*")


def redacted(url: str) -> str:
    """The URL without its passwords."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "the URL"
    url = _SECRET.sub(r"\1***", url)
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
        if now + delay - self._since > self._seconds:
            raise unavailable(error) from error
        self._delay = min(self._delay * 2, 2.0)
        return delay


_TLS_REMEDIES = {
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not trusted: name the CA with ssl_ca_certs=",
    "CERTIFICATE_REQUIRED": "it asks for a certificate: add ssl_certfile= and ssl_keyfile=",
    "HANDSHAKE_FAILURE": "it refused our certificate: look at ssl_certfile= and ssl_keyfile=",
    "UNKNOWN_CA": "it does not trust our certificate: look at ssl_certfile=",
}
"""What OpenSSL says, and what to change in the URL. None of these heals by itself."""


def _tls_remedy(error: Exception) -> str | None:
    text = str(error).replace(" ", "_").upper()
    return next((remedy for word, remedy in _TLS_REMEDIES.items() if word in text), None)


def unavailable(error: Exception) -> RedisUnavailable:
    if isinstance(error, FATAL):
        return RedisUnavailable(f"Redis refused the login: {error}; check user and password")
    remedy = _tls_remedy(error)
    if remedy is not None:
        return RedisUnavailable(f"no TLS connection to Redis ({error}): {remedy}")
    return RedisUnavailable(
        f"Redis does not answer ({error}); check that it runs and the URL is right (rediss:// for "
        "a TLS port)"
    )


def is_full(error: Exception) -> bool:
    """Redis' own refusal because its memory is full."""
    # Redis 6.2 wraps what a script met in words of its own.
    return "OOM command not allowed" in str(error) or isinstance(
        error, redis.exceptions.OutOfMemoryError
    )


def is_transient(error: Exception) -> bool:
    """An answer that another try may change, a script's demoted master among them."""
    if isinstance(error, FATAL) or _tls_remedy(error) is not None:
        return False
    if isinstance(error, TRANSIENT):
        return True
    text = str(error)
    return isinstance(error, redis.exceptions.ResponseError) and (
        any(word in text for word in REFUSALS) or text.startswith("UNBLOCKED")
    )


def translate(error: Exception) -> Exception:
    """What to raise for an error that another try can't change."""
    if is_full(error):
        return QueueFull(
            "Redis' memory is full (maxmemory, noeviction): wait for workers, forget old results, "
            "or give Redis more memory"
        )
    if isinstance(error, FATAL) or _tls_remedy(error) is not None:
        return unavailable(error)
    if isinstance(error, redis.exceptions.NoPermissionError):
        return RedisUnavailable(f"the Redis user may not do this: {error}")
    if isinstance(error, redis.exceptions.ResponseError) and "DB index" in str(error):
        return RedisUnavailable(f"Redis has no such database ({error}): check the URL's /NUMBER")
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
    task = asyncio.current_task()
    cancels = task.cancelling() if task is not None else 0
    while True:
        try:
            reply = await _send_once_async(client, call)
            # Before Python 3.12 `asyncio.wait_for`, which redis-py writes with, drops a
            # cancellation that comes as it ends (cpython issue 86296).
            if task is not None and task.cancelling() > cancels:
                raise asyncio.CancelledError
            return reply
        except redis.exceptions.RedisError as error:
            if not is_transient(error):
                raise translate(error) from error
            await asyncio.sleep(patience.next_delay(error))


async def _send_once_async(client: Any, call: Eval | Commands | Block) -> Any:
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
    return await _blocking(client.execute_command(*call.command))


async def _blocking(command: Coroutine[Any, Any, Any]) -> Any:
    """A command that Redis holds for seconds: whoever is cancelled does not wait for its end, also
    where `asyncio.wait_for` dropped the cancellation inside."""
    inner = asyncio.ensure_future(command)
    try:
        await asyncio.wait({inner})
    except asyncio.CancelledError:
        while not inner.done():
            inner.cancel()
            await asyncio.wait({inner}, timeout=0.05)
        if not inner.cancelled():
            inner.exception()
        raise
    return inner.result()


def _send_once(client: RedisClient, call: Eval | Commands | Block) -> Any:
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
    return client.execute_command(*call.command)


def chunks(items: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
