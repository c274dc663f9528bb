"""One sequence: its tokens, its settings and how far it has come. Nothing here knows torch.

The scheduler moves `num_computed_tokens` towards `num_tokens`; blocks belong to the BlockManager.
"""

import enum
from dataclasses import dataclass, field

from headrace.engine.errors import Failure
from headrace.engine.sampling_params import SamplingParams


class SequenceStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """The OpenAI names where they exist."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one output position, of the model's own distribution
    (before temperature and filters): the sampled token's, and the most likely ids, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt becoming an answer.

    `request_id` is the caller's name for it, opaque here; `seq_id` is given by `Engine.add`.
    `seed` is the noise's key: `params.seed` where given, else whatever makes a resumed job draw the
    same noise (a hash of the job id); `sample_index` tells the n answers of one request apart.
    `output_token_ids` may be filled before `Engine.add`: the sequence then continues after them.
    `salt` separates prefix-cache entries that must not be shared (tenants, adapters).
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int = 0
    sample_index: int = 0
    salt: bytes = b""
    output_token_ids: list[int] = field(default_factory=list)

    seq_id: int = -1
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    max_output_tokens: int = 0
    num_preemptions: int = 0
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    failure: Failure | None = None
    arrival_time: float = 0.0
    first_token_time: float = 0.0
    finish_time: float = 0.0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED
