"""What the user chose for `headrace run`, and how it went."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.producer.bulk.ledger import OnBadLine
from headrace.producer.bulk.pump import MAX_JOBS, Totals
from headrace.producer.bulk.reader import MAX_LINE_BYTES


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the user chose. `model` None: what the service serves, else the demo model.

    `redis_url` None: a private Redis. `local_worker` None: one is started unless a live worker of
    the given Redis serves the model. `defaults`: sampling for lines that do not say.
    `worker_arguments`: further options of `headrace worker`.
    """

    input: Path
    output: Path
    errors: Path | None = None
    model: str | None = None
    served_model_name: str | None = None
    redis_url: str | None = None
    queue: str | None = None
    local_worker: bool | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    on_bad_line: OnBadLine = "quarantine"
    ordered: bool = False
    restart: bool = False
    retry_errors: bool = False
    max_tasks: int | None = None
    max_line_bytes: int = MAX_LINE_BYTES
    max_jobs: int = MAX_JOBS
    worker_arguments: tuple[str, ...] = ()
    worker_log: Path | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """How it went. Lines are counted over all sessions of the run, tokens and time in this one."""

    exit_code: int
    model: str
    output: Path
    errors: Path | None
    total: int
    succeeded: int
    failed: int
    skipped: int
    resumed: int
    interrupted: bool
    seconds: float
    totals: Totals
    worker_restarts: int = 0

    @property
    def jobs_per_second(self) -> float:
        return self.totals.jobs / self.seconds if self.seconds > 0 else 0.0

    @property
    def output_tokens_per_second(self) -> float:
        return self.totals.completion_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def total_tokens_per_second(self) -> float:
        tokens = self.totals.prompt_tokens + self.totals.completion_tokens
        return tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Prompt tokens that came from the prefix cache, of all prompt tokens."""
        if not self.totals.prompt_tokens:
            return 0.0
        return self.totals.cached_tokens / self.totals.prompt_tokens

    def as_json(self) -> dict[str, Any]:
        return {
            "exit_code": self.exit_code,
            "model": self.model,
            "output": str(self.output),
            "errors": str(self.errors) if self.errors else None,
            "total": self.total,
            "succeeded": self.succeeded,
            "failed": self.failed,
            "skipped": self.skipped,
            "resumed": self.resumed,
            "interrupted": self.interrupted,
            "seconds": round(self.seconds, 3),
            "jobs": self.totals.jobs,
            "jobs_per_second": round(self.jobs_per_second, 3),
            "prompt_tokens": self.totals.prompt_tokens,
            "completion_tokens": self.totals.completion_tokens,
            "output_tokens_per_second": round(self.output_tokens_per_second, 2),
            "total_tokens_per_second": round(self.total_tokens_per_second, 2),
            "prefix_cache_hit_rate": round(self.prefix_cache_hit_rate, 4),
            "worker_restarts": self.worker_restarts,
        }
