"""Takes work in windows, so that tasks with a common beginning come one after the other."""

from collections.abc import Iterator

from headrace.producer.bulk.ledger import Work

WINDOW_TASKS = 4096
WINDOW_BYTES = 32 * 2**20


def by_prefix(
    work: Iterator[Work], max_tasks: int = WINDOW_TASKS, max_bytes: int = WINDOW_BYTES
) -> Iterator[Work]:
    """The same work, sorted by prompt within windows of bounded number and size.

    The worker's prefix cache then finds a shared beginning while its blocks are still there.
    """
    window: list[Work] = []
    size = 0
    for item in work:
        window.append(item)
        size += item.task.size
        if len(window) >= max_tasks or size >= max_bytes:
            yield from sorted(window, key=_key)
            window.clear()
            size = 0
    yield from sorted(window, key=_key)


def _key(work: Work) -> str:
    return work.task.prefix_key()
