"""What one worker does in a second, and what a job therefore costs in worker seconds."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServiceRate:
    """Measured rates of one worker with a full batch.

    `stream_tokens_per_s` is what one sequence decodes at when it is alone; by default the worker is
    taken to reach its full rate only with all `slots` in use.
    """

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    slots: int
    stream_tokens_per_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("prefill_tokens_per_s", "decode_tokens_per_s", "slots"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.stream_tokens_per_s is not None and not self.stream_tokens_per_s > 0:
            raise ValueError(f"stream_tokens_per_s must be above 0, got {self.stream_tokens_per_s}")

    @property
    def max_share(self) -> float:
        """The largest part of the worker that one sequence can use."""
        if self.stream_tokens_per_s is None:
            return 1.0 / self.slots
        return min(1.0, self.stream_tokens_per_s / self.decode_tokens_per_s)

    def work_s(self, prompt_tokens: float, output_tokens: float) -> float:
        """Seconds of one full worker: prompt / prefill rate + output / decode rate."""
        return prompt_tokens / self.prefill_tokens_per_s + output_tokens / self.decode_tokens_per_s

    def alone_s(self, prompt_tokens: float, output_tokens: float) -> float:
        """Seconds that a job takes at the least, with the worker to itself."""
        return self.work_s(prompt_tokens, output_tokens) / self.max_share
