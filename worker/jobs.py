"""The one name that every job carries, `headrace.worker.jobs.generate`. It names no code that runs.

What a job asks is read in `wire_request`, what is answered is written in `wire_result`.
"""

from typing import Any, NoReturn


class WrongWorker(RuntimeError):
    """A stock RQ worker tried to run one of our jobs."""


def generate(*_args: Any, **_kwargs: Any) -> NoReturn:
    """The name that every job carries. It runs nowhere: our worker never calls it."""
    raise WrongWorker(
        "this job is served by Headrace's own worker, which batches many at once; "
        "run `headrace worker --model MODEL` instead of `rq worker` on this queue, "
        "and requeue the job"
    )
