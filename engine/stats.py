"""What a step tells about itself. Stats leave in the step's output; nobody reaches in for them."""

from dataclasses import dataclass, field

from headrace.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class StepStats:
    """Counts of one step (not totals). Seconds are wall time."""

    num_running: int = 0
    num_waiting: int = 0
    num_prompt_tokens: int = 0
    """Prompt tokens computed in this step (prefix-cache hits are not computed)."""
    num_output_tokens: int = 0
    num_scheduled_tokens: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    """Tokens looked up in the prefix cache by sequences admitted in this step."""
    prefix_cache_hits: int = 0
    kv_usage: float = 0.0
    """Share of the pool's blocks that running sequences hold, 0 to 1."""
    seconds: float = 0.0
    host_seconds: float = 0.0
    """Of `seconds`, what was spent scheduling, updating and detokenizing."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """`finished` ended in this step (any reason); `progressed` got tokens and go on."""

    finished: list[Sequence] = field(default_factory=list)
    progressed: list[Sequence] = field(default_factory=list)
    stats: StepStats = field(default_factory=StepStats)
