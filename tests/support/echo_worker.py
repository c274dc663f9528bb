"""A worker without an engine: claims over the real queue and answers with the prompt itself.

`python echo_worker.py REDIS_URL QUEUE [--seconds-per-claim S]`. A prompt `fail:CODE` fails with
that code, `retryable:CODE` fails retryably the first time that this process sees it. Ends by
SIGTERM, or with its parent.
"""

import argparse
import os
import signal
import time

import orjson

from headrace.producer import codec
from headrace.producer.schemas import Choice, Failure, Request, Result, Usage
from headrace.worker.lease import RedisSource
from headrace.worker.lease_settings import LeaseSettings
from headrace.worker.source import (
    ClaimedJob,
    Outcome,
    OutcomeKind,
    SourceUnavailable,
    WorkerFacts,
    WorkerState,
)

_seen: set[str] = set()


def answer(job: ClaimedJob) -> Outcome:
    request = Request.model_validate(orjson.loads(job.payload))
    text = request.prompt if isinstance(request.prompt, str) else ""
    if request.messages:
        text = request.messages[-1].content
    kind, _, code = text.partition(":")
    failure = None
    if kind == "fail":
        failure = Failure(code=code, message="as asked")
    elif kind == "retryable" and text not in _seen:
        _seen.add(text)
        failure = Failure(code=code, message="as asked", retryable=True)
    result = Result(
        job_id=job.job_id,
        model="echo",
        object="chat.completion" if request.messages else "text_completion",
        created=int(time.time()),
        choices=[] if failure else [Choice(index=0, text=text, finish_reason="stop")],
        usage=Usage(prompt_tokens=len(text), completion_tokens=len(text)),
        failure=failure,
        custom_id=request.custom_id,
        metadata=request.metadata,
    )
    outcome = OutcomeKind.FAILED if failure else OutcomeKind.SUCCEEDED
    return Outcome(job, outcome, codec.encode_result(result), len(text), len(text))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("queue")
    parser.add_argument("--seconds-per-claim", type=float, default=0.0)
    parser.add_argument("--most", type=int, default=128)
    parser.add_argument("--lease-seconds", type=float, default=60.0)
    options = parser.parse_args()
    settings = LeaseSettings(lease=options.lease_seconds)
    source = RedisSource.from_url(options.url, [options.queue], settings=settings)
    source.start()
    stopping = False

    def stop(number: int, frame: object) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    facts = WorkerFacts(
        model=options.queue, state=WorkerState.READY, queues=(options.queue,), slots=128
    )
    source.announce(facts)
    print("ready", flush=True)
    parent = os.getppid()
    announced = time.monotonic()
    while not stopping and os.getppid() == parent:
        try:
            jobs = source.claim(options.most, 0.2)
            if jobs:
                time.sleep(options.seconds_per_claim)
                source.finish([answer(job) for job in jobs])
            if time.monotonic() - announced > 1:
                source.announce(facts)
                source.reap()
                announced = time.monotonic()
        except SourceUnavailable:
            time.sleep(0.2)
    source.unregister()


if __name__ == "__main__":
    main()
