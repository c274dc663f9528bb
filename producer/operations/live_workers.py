"""Which workers live and what they serve, and which lists a queue has."""

from dataclasses import dataclass, field

from headrace.producer import keys
from headrace.producer.operations.steps import Steps, mapping_of, text_of
from headrace.producer.scripts import Commands


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A live worker as it describes itself."""

    name: str
    state: str
    model: str
    queues: tuple[str, ...]
    facts: dict[str, str] = field(default_factory=dict)


def workers() -> Steps[list[WorkerInfo]]:
    """Workers that are alive and have said what they serve."""
    (known,) = yield Commands((("SMEMBERS", keys.workers()),))
    prefix = keys.worker("")
    names = sorted(text_of(key).removeprefix(prefix) for key in known)
    if not names:
        return []
    replies = yield Commands(tuple(("HGETALL", keys.facts(name)) for name in names))
    found = []
    for name, reply in zip(names, replies, strict=True):
        facts = mapping_of(reply)
        if facts:
            queues = tuple(queue for queue in facts.get("queues", "").split(",") if queue)
            found.append(
                WorkerInfo(name, facts.get("state", "?"), facts.get("model", ""), queues, facts)
            )
    return found


def lists_of(queue: str) -> Steps[list[str]]:
    """The lists of a queue that exist, by name."""
    (known,) = yield Commands((("SMEMBERS", keys.queues()),))
    prefix = keys.queue_list("")
    names = (text_of(key).removeprefix(prefix) for key in known)
    return sorted(name for name in names if keys.queue_of(name) == queue)
