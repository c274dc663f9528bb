"""What a worker needs of an engine (`engine.engine.Engine`), and how it may be broken.

Protocols only, so that the loop and its parts run over any engine that offers this.
"""

from typing import Any, Protocol

from headrace.engine.sequence import Sequence
from headrace.engine.stats import StepOutput


class EngineBroken(RuntimeError):
    """The engine's own state can no longer be trusted; a new process must take over."""


class JobTokenizer(Protocol):
    """What reading and answering need of a tokenizer (`engine.tokenizer.Tokenizer`)."""

    @property
    def vocab_size(self) -> int: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]: ...
    def token_text(self, token_id: int) -> str: ...
    def token_bytes(self, token_id: int) -> bytes | None: ...


class JobLimits(Protocol):
    @property
    def max_model_len(self) -> int: ...


class JobEngine(Protocol):
    """What reading and answering need of an engine."""

    @property
    def tokenizer(self) -> JobTokenizer: ...
    @property
    def limits(self) -> JobLimits: ...
    @property
    def default_sampling(self) -> dict[str, Any]: ...


class SlotLimits(JobLimits, Protocol):
    @property
    def max_num_seqs(self) -> int: ...


class ServingEngine(Protocol):
    """What the loop needs of an engine."""

    @property
    def tokenizer(self) -> JobTokenizer: ...
    @property
    def limits(self) -> SlotLimits: ...
    @property
    def default_sampling(self) -> dict[str, Any]: ...
    @property
    def has_unfinished(self) -> bool: ...
    @property
    def num_unfinished(self) -> int: ...
    def add(self, seq: Sequence) -> object: ...
    def abort(self, seq_id: int) -> object: ...
    def step(self) -> StepOutput: ...
    def check_integrity(self) -> None: ...
