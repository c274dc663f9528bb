"""Redis behind Sentinels: one URL for all of them, and clients that ask them who is primary.

    redis+sentinel://[user:password@]host[:port][,host[:port]...]/SERVICE[/DB][?option=value&...]

`rediss+sentinel://` (or `ssl=1`) speaks TLS with the Sentinels and with the servers. Options are
those of a `rediss://` URL (`ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile`, ...) and, as Sentinels
have users of their own, `sentinel_username` and `sentinel_password`. Nothing here sends anything.
"""

from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

import redis
import redis.asyncio
from redis.connection import URL_QUERY_ARGUMENT_PARSERS

from headrace.producer.errors import RedisUnavailable

SCHEMES: Final = ("redis+sentinel://", "rediss+sentinel://")
DEFAULT_PORT: Final = 26379


@dataclass(frozen=True, slots=True)
class SentinelAddress:
    """What a sentinel URL says. `server`, `sentinel`: connection settings of each. Clients are made
    with settings of the caller's, a `retry` among them."""

    addresses: tuple[tuple[str, int], ...]
    service: str
    server: dict[str, Any]
    sentinel: dict[str, Any]

    def client(self, **settings: Any) -> redis.Redis:
        from redis.sentinel import Sentinel

        sentinel = Sentinel(list(self.addresses), sentinel_kwargs=self._quick(settings))  # type: ignore[no-untyped-call]
        found: redis.Redis = sentinel.master_for(self.service, **{**settings, **self.server})  # type: ignore[no-untyped-call]
        return found

    def async_client(self, **settings: Any) -> "redis.asyncio.Redis":
        from redis.asyncio.sentinel import Sentinel

        sentinel = Sentinel(list(self.addresses), sentinel_kwargs=self._quick(settings))  # type: ignore[no-untyped-call]
        found: redis.asyncio.Redis = sentinel.master_for(
            self.service, **{**settings, **self.server}
        )
        return found

    def _quick(self, settings: dict[str, Any]) -> dict[str, Any]:
        """A Sentinel that does not answer must not keep us from the next one; redis-py's own
        retries would, for seconds."""
        return {
            "socket_timeout": 2.0,
            "socket_connect_timeout": 2.0,
            "retry": settings["retry"],
            **self.sentinel,
        }


def parse(url: str) -> SentinelAddress:
    """Read a sentinel URL. RedisUnavailable says what is wrong with it."""
    parts = urlsplit(url)
    login, _, hosts = parts.netloc.rpartition("@")
    path = [unquote(part) for part in parts.path.split("/") if part]
    if not hosts or not path:
        raise RedisUnavailable(
            "a sentinel URL is redis+sentinel://[user:password@]host:port[,host:port]/SERVICE[/DB]"
        )
    server: dict[str, Any] = {}
    sentinel: dict[str, Any] = {}
    for name, text in parse_qsl(parts.query):
        value = _option(name, text)
        if name.startswith("sentinel_"):
            sentinel[name.removeprefix("sentinel_")] = value
        elif name.startswith("ssl"):
            server[name] = sentinel[name] = value
        else:
            server[name] = value
    if parts.scheme == "rediss+sentinel":
        server["ssl"] = sentinel["ssl"] = True
    server["db"] = _number(path[1], "database") if len(path) > 1 else 0
    if login:
        user, _, password = login.rpartition(":")
        server["username"] = unquote(user) or None
        server["password"] = unquote(password)
    return SentinelAddress(tuple(map(_address, hosts.split(","))), path[0], server, sentinel)


def _option(name: str, text: str) -> Any:
    if name == "ssl":
        return text.lower() in ("1", "true", "yes")
    reader: Any = URL_QUERY_ARGUMENT_PARSERS.get(name)
    try:
        return reader(text) if reader is not None else text
    except (TypeError, ValueError) as error:
        raise RedisUnavailable(f"{name}={text} in the sentinel URL cannot be read") from error


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or port.endswith("]"):
        return text.strip("[]"), DEFAULT_PORT
    return host.strip("[]"), _number(port, "port")


def _number(text: str, what: str) -> int:
    if not text.isdecimal():
        raise RedisUnavailable(f"{text!r} is no {what} (in the sentinel URL)")
    return int(text)
