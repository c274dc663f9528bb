"""From what a caller gives to chunks of encoded jobs. Pure, like `operations`."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from types import UnionType
from typing import Any, Protocol, TypeVar

from headrace.producer import codec, keys, operations
from headrace.producer.errors import HeadraceError, InvalidRequest, PayloadTooLarge
from headrace.producer.operations import Placement, RequestLike, Settings, Steps
from headrace.producer.schemas import Request, Result

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Options:
    """Where jobs go and under which terms, as callers say it.

    `queue` None: the client's, the model's, or the one that the live workers serve. `priority`:
    high, normal or low, with ageing. `tenant`: tenants share a queue evenly by tokens. `batch`: a
    batch to count the jobs in. `deadline` and `start_at`: Unix seconds; a job past its deadline
    ends as expired. `max_attempts` counts errors of the engine (3). `result_ttl` and `failure_ttl`:
    seconds that a record is kept, -1 for ever.
    """

    queue: str | None = None
    priority: keys.Priority = "normal"
    tenant: str | None = None
    batch: str | None = None
    deadline: float | None = None
    start_at: float | None = None
    max_attempts: int | None = None
    result_ttl: int | None = None
    failure_ttl: int | None = None

    def placement(self, queue: str) -> Placement:
        if self.batch is not None:
            keys.check_id("batch", self.batch)
        for name in ("deadline", "start_at"):
            moment = getattr(self, name)
            if moment is not None and not (_is_number(moment) and 0 < moment < 1e11):
                raise InvalidRequest(f"{name} must be Unix seconds", name)
        for name in ("max_attempts", "result_ttl", "failure_ttl"):
            number = getattr(self, name)
            if number is not None and not (_is_number(number, int) and abs(number) < 1e11):
                raise InvalidRequest(f"{name} must be a whole number", name)
        if self.deadline is not None and self.deadline < time.time() - 86400:
            raise InvalidRequest(
                "deadline is more than a day ago; it is Unix seconds, not seconds from now",
                "deadline",
            )
        if self.max_attempts is not None and self.max_attempts < 1:
            raise InvalidRequest("max_attempts must be at least 1", "max_attempts")
        return Placement(
            name=keys.list_name(keys.check_queue(queue), self.priority, self.tenant),
            batch=self.batch or "",
            deadline=self.deadline,
            start_at=self.start_at,
            max_attempts=self.max_attempts,
            result_ttl=self.result_ttl,
            failure_ttl=self.failure_ttl,
        )


def split(given: Mapping[str, Any]) -> tuple[Options, dict[str, Any]]:
    """Keyword arguments of a submission, parted into its options and the request's fields."""
    names = Options.__dataclass_fields__
    options = Options(**{name: value for name, value in given.items() if name in names})
    return options, {name: value for name, value in given.items() if name not in names}


def request_of(
    prompt: str | list[int] | None,
    messages: Sequence[Mapping[str, Any]] | None,
    fields: Mapping[str, Any],
) -> Request:
    given: dict[str, Any] = dict(fields)
    if prompt is not None:
        given["prompt"] = prompt
    if messages is not None:
        try:
            given["messages"] = [dict(message) for message in messages]
        except (TypeError, ValueError):
            given["messages"] = messages
    return operations.to_request(given, {})


def submit(
    requests: Sequence[Request],
    options: Options,
    settings: Settings,
    job_ids: Sequence[str] | None = None,
    block_until: float | None = None,
) -> Steps[list[str]]:
    """Send one chunk, each request to the queue of its model; the ids in the requests' order."""
    if not requests:
        return []
    for job_id in job_ids or ():
        keys.check_id("job_id", job_id)
    if job_ids is not None and len(set(job_ids)) != len(job_ids):
        raise InvalidRequest("a job id occurs twice in one call", "job_ids")
    placements: dict[str | None, Placement] = {}
    for model in dict.fromkeys(request.model for request in requests):
        queue = options.queue
        if queue is None:
            queue = yield from operations.resolve_queue(settings, model)
        placements[model] = options.placement(queue)
    ids = list(job_ids) if job_ids is not None else [operations.new_job_id() for _ in requests]
    outgoing: dict[Placement, list[operations.Outgoing]] = {}
    for index, (request, job_id) in enumerate(zip(requests, ids, strict=True)):
        placement = placements[request.model]
        with _at(index):
            job = operations.encode(request, placement, job_id, settings)
        outgoing.setdefault(placement, []).append(job)
    accepted: list[str] = []
    try:
        for placement, jobs in outgoing.items():
            for part in _parts(jobs):
                yield from operations.submit_chunk(part, placement, settings, block_until, accepted)
    except HeadraceError as error:
        error.accepted = tuple(accepted)
        raise
    return ids


@contextmanager
def _at(index: int) -> Iterator[None]:
    try:
        yield
    except InvalidRequest as error:
        error.index = index
        raise


def submit_one(
    request: Request, options: Options, settings: Settings, job_id: str | None
) -> Steps[str]:
    """Send one; its id."""
    ids = [job_id] if job_id is not None else None
    try:
        (accepted,) = yield from submit([request], options, settings, ids)
    except InvalidRequest as error:
        error.index = None
        raise
    return accepted


class Sent(Protocol):
    """A job that the caller has in hand."""

    @property
    def id(self) -> str: ...


@contextmanager
def after(earlier: Sequence[Sent]) -> Iterator[None]:
    """What is raised inside says which jobs of the same call had been sent before, `earlier` among
    them, and counts the requests from the first of all."""
    try:
        yield
    except HeadraceError as error:
        error.accepted = (*(job.id for job in earlier), *error.accepted)
        if isinstance(error, InvalidRequest) and error.index is not None:
            error.index += len(earlier)
        raise


def _is_number(value: Any, kind: type | UnionType = int | float) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


PART_BYTES = 8 * 1024 * 1024


def _parts(jobs: list[operations.Outgoing]) -> Iterator[list[operations.Outgoing]]:
    """Chunks that block Redis for no more than some milliseconds, however large the jobs."""
    part: list[operations.Outgoing] = []
    size = 0
    for job in jobs:
        if part and size + len(job.data) > PART_BYTES:
            yield part
            part, size = [], 0
        part.append(job)
        size += len(job.data)
    if part:
        yield part


def chunked(
    requests: Iterable[RequestLike],
    job_ids: Iterable[str] | None,
    defaults: Mapping[str, Any],
    size: int,
) -> Iterator[tuple[list[Request], list[str] | None]]:
    """Requests with their ids, `size` at a time. InvalidRequest when the ids run out."""
    source = each(requests)
    ids = iter(several(job_ids)) if job_ids is not None else None
    while some := take(source, min(max(1, size), 1000)):
        chosen = None
        if ids is not None:
            chosen = take_ids(ids, len(some))
        yield [_request_at(index, item, defaults) for index, item in enumerate(some)], chosen


def _request_at(index: int, item: RequestLike, defaults: Mapping[str, Any]) -> Request:
    try:
        return operations.to_request(item, defaults)
    except InvalidRequest as error:
        error.index = index
        raise


def each(requests: Iterable[T]) -> Iterator[T]:
    """What is asked, one by one; InvalidRequest for a single request, whose letters or field names
    would be taken for prompts, and for what can't be gone through."""
    if isinstance(requests, (str, bytes, Mapping, Request)):
        raise InvalidRequest("give a list of requests; a single one goes to submit", "requests")
    try:
        return iter(requests)
    except TypeError:
        kind = type(requests).__name__
        raise InvalidRequest(f"give a list of requests, not {kind}", "requests") from None


def several(job_ids: Iterable[str]) -> Iterable[str]:
    """The job ids; InvalidRequest for a single one, which would be taken letter by letter."""
    if isinstance(job_ids, (str, bytes)):
        raise InvalidRequest("give a list of job ids, not one", "job_ids")
    return job_ids


def check_call(fields: Mapping[str, Any]) -> None:
    """InvalidRequest for what no request of a call could be sent with."""
    options, defaults = split(fields)
    options.placement("any")
    has_input = not defaults.keys().isdisjoint(("prompt", "messages"))
    operations.to_request({} if has_input else "any", defaults)


def sift(
    requests: Sequence[RequestLike], fields: Mapping[str, Any], settings: Settings
) -> list[Request | Result]:
    """Each request as it can be sent, or a Result with the failure that says why it can't be."""
    options, defaults = split(fields)
    named = options.queue is not None or settings.queue is not None
    sifted: list[Request | Result] = []
    for item in requests:
        try:
            request = operations.to_request(item, defaults)
            codec.encode_request(request, settings.max_payload_bytes)
            if not named and request.model not in (None, "default"):
                keys.check_queue(request.model or "")
            sifted.append(request)
        except InvalidRequest as error:
            sifted.append(_unsent(item, error))
    return sifted


def _unsent(item: RequestLike, error: InvalidRequest) -> Result:
    code = "payload_too_large" if isinstance(error, PayloadTooLarge) else "invalid_request"
    result = codec.failed("", code, str(error), error.param)
    known = item.model_dump(exclude_unset=True) if isinstance(item, Request) else item
    if isinstance(known, Mapping):
        custom_id, metadata = known.get("custom_id"), known.get("metadata")
        result = result.model_copy(
            update={
                "custom_id": custom_id if isinstance(custom_id, str) else None,
                "metadata": dict(metadata) if isinstance(metadata, Mapping) else None,
            }
        )
    return result


def window(size: int) -> int:
    """How far `map` may run ahead of its reader."""
    if not _is_number(size, int) or size < 1:
        raise InvalidRequest("window must be a whole number of at least 1", "window")
    return size


def take_ids(ids: Iterator[str], count: int) -> list[str]:
    """The next `count` job ids; InvalidRequest when they run out."""
    taken = take(ids, count)
    if len(taken) != count:
        raise InvalidRequest("there are fewer job ids than requests", "job_ids")
    return taken


def take(source: Iterator[T], count: int) -> list[T]:
    return list(islice(source, count))
