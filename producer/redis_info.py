"""What a Redis server says about itself, and what to change on it before jobs go there."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import redis

from headrace.producer.redis_binary import MINIMUM_VERSION


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What INFO says, and what ought to be changed. CONFIG is asked only where it is allowed."""

    version: str
    mode: str
    role: str
    append_only: bool
    eviction_policy: str
    memory_bytes: int
    memory_limit_bytes: int
    problems: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def usable(self) -> bool:
        return not self.problems


def inspect_server(connection: redis.Redis, *, prefix: str = "rq") -> ServerFacts:
    """Read version, persistence and eviction policy by INFO (managed services block CONFIG).

    `problems` make the server unusable, `warnings` put jobs at risk; each says what to set.
    """
    info = connection.info("everything")
    version = str(info.get("redis_version", "0"))
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    mode = str(info.get("redis_mode", "standalone"))
    role = str(info.get("role", "master"))
    append_only = bool(int(info.get("aof_enabled", 0)))
    policy = str(info.get("maxmemory_policy", "unknown"))
    limit = int(info.get("maxmemory", 0))
    problems: list[str] = []
    warnings: list[str] = []
    if numbers < MINIMUM_VERSION:
        problems.append(f"Redis {version} is too old: 6.2 or later is needed")
    if mode == "cluster" and not re.search(r"\{[^}]+\}", prefix):
        problems.append(
            "Redis Cluster would spread a job's keys over nodes: set RQ_KEY_PREFIX to a hash tag"
            " such as {rq} to keep them on one, or use several Redis servers"
        )
    if role not in ("master", "primary"):
        problems.append(f"this server is a {role}: connect to the primary, or through Sentinel")
    if not append_only:
        warnings.append(
            "the append-only file is off: a restart of Redis loses jobs"
            " (set appendonly yes and appendfsync everysec)"
        )
    if policy not in ("noeviction", "unknown"):
        warnings.append(
            f"maxmemory-policy is {policy}: Redis may drop jobs when memory is full"
            " (set maxmemory-policy noeviction)"
        )
    if str(info.get("aof_last_write_status", "ok")) != "ok":
        warnings.append("the last write of the append-only file failed: look at the disk")
    warnings.extend(_memory_knobs(connection))
    return ServerFacts(
        version=version,
        mode=mode,
        role=role,
        append_only=append_only,
        eviction_policy=policy,
        memory_bytes=int(info.get("used_memory", 0)),
        memory_limit_bytes=limit,
        problems=tuple(problems),
        warnings=tuple(warnings),
    )


def _memory_knobs(connection: redis.Redis) -> Iterator[str]:
    for name, wanted, kind in (
        ("hash-max-ziplist-value", 4096, "at least"),
        ("stream-node-max-bytes", 256, "at most"),
    ):
        try:
            value = connection.config_get(name).get(name)
        except redis.RedisError:
            return  # CONFIG is not allowed here
        if value is None:
            continue
        low = kind == "at least"
        if (low and int(value) < wanted) or (not low and int(value) > wanted):
            yield f"{name} is {value}: {wanted} saves about half the memory of a short job"
