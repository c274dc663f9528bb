"""What a client does with every job, as its owner chose. Frozen."""

from dataclasses import dataclass

from headrace.producer import codec, keys


@dataclass(frozen=True, slots=True)
class Settings:
    """What a client does with every job. Times in seconds; 0 means no limit.

    `max_queue_depth` and `max_queue_bytes` (of payloads not yet done) refuse admission;
    `memory_watermark` does at that share of Redis' maxmemory. `large`: payloads of more bytes go to
    the blob store.
    """

    queue: str | None = None
    result_ttl: int = keys.RESULT_TTL
    failure_ttl: int = keys.FAILURE_TTL
    max_queue_depth: int = 0
    max_queue_bytes: int = 0
    memory_watermark: float = 0.95
    max_payload_bytes: int = codec.MAX_PAYLOAD_BYTES
    retry_for: float = 30.0
    large: int = 0
    clock: str = ""
