"""What waits and runs in each queue, read in O(1) a queue. Knows no commands and no files."""

from dataclasses import dataclass

from headrace.producer import connection, keys
from headrace.producer.client import Client
from headrace.producer.scripts import Commands


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """Jobs of one queue, over its priority classes and tenants."""

    queue: str
    queued: int = 0
    running: int = 0
    scheduled: int = 0
    dead: int = 0


def queue_depths(client: Client) -> list[QueueDepth]:
    """Every queue that was ever used here."""
    patience = client.settings.retry_for
    (known,) = connection.send(client.redis, Commands((("SMEMBERS", keys.queues()),)), patience)
    prefix = keys.queue_list("")
    lists = sorted(key.decode().removeprefix(prefix) for key in known)
    if not lists:
        return []
    commands: list[tuple[str, ...]] = []
    for name in lists:
        commands += [
            ("LLEN", keys.queue_list(name)),
            ("HGET", keys.ghosts(), name),
            ("ZCARD", keys.registry("wip", name)),
            ("ZCARD", keys.registry("scheduled", name)),
        ]
    names = sorted({keys.queue_of(name) for name in lists})
    commands += [("ZCARD", keys.dead(name)) for name in names]
    replies = connection.send(client.redis, Commands(tuple(commands)), patience)
    counts = {name: [0, 0, 0] for name in names}
    for index, name in enumerate(lists):
        waiting, ghosts, running, scheduled = replies[4 * index : 4 * index + 4]
        count = counts[keys.queue_of(name)]
        count[0] += max(0, int(waiting) - int(ghosts or 0))
        count[1] += int(running)
        count[2] += int(scheduled)
    dead = dict(zip(names, replies[4 * len(lists) :], strict=True))
    found = []
    for name in names:
        queued, running, scheduled = counts[name]
        found.append(QueueDepth(name, queued, running, scheduled, int(dead[name])))
    return found
