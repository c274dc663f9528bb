"""What the operator chose for a worker. Frozen; knows neither the command line nor Redis."""

from dataclasses import dataclass, field
from pathlib import Path

from headrace.engine.config import EngineConfig
from headrace.worker.drain import PROFILES
from headrace.worker.loop import LoopSettings

DEFAULT_PORT = 9151


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Seconds are wall time.

    `port` None: DEFAULT_PORT, or any free one when that is taken. `drain_timeout` None: what the
    profile gives. `hang_timeout`: a step older than this is a hang. `connect_timeout`: how long a
    Redis that does not answer is tried at the start.
    """

    engine: EngineConfig
    redis_url: str
    queues: tuple[str, ...] = ()
    name: str | None = None
    host: str = "127.0.0.1"
    port: int | None = None
    drain_profile: str = "on-demand"
    drain_timeout: float | None = None
    spot_notice: str | None = None
    hang_timeout: float = 600.0
    lease_seconds: float = 60.0
    max_attempts: int = 3
    max_crashes: int = 3
    connect_timeout: float = 5.0
    exit_with_parent: bool = False
    deletion_cost: bool = False
    loop: LoopSettings = field(default_factory=LoopSettings)

    @property
    def served_model(self) -> str:
        """The name that requests and queues use: the last part of the path, lower-case."""
        return self.engine.served_model_name or default_served_name(self.engine.model)

    @property
    def served_queues(self) -> tuple[str, ...]:
        return self.queues or (self.served_model,)

    @property
    def grace(self) -> float:
        """Seconds that a drain may take."""
        if self.drain_timeout is not None:
            return self.drain_timeout
        return PROFILES[self.drain_profile]


def default_served_name(model: str) -> str:
    """`org/Name-1B` and `/models/Name-1B.gguf` are both served as `name-1b`."""
    name = model.rstrip("/").rsplit("/", 1)[-1]
    if name in ("", ".", "..", "~"):
        name = Path(model).expanduser().resolve().name
    return name.removesuffix(".gguf").removesuffix(".GGUF").lower()
