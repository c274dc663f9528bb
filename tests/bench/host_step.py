"""What the host half of a step costs, with a runner that computes nothing.

    python tests/bench/host_step.py

Microseconds of scheduling, updating, detokenizing and stop checks for each running sequence: by how
many run, and by how many wait. Medians over steps in which everybody decodes.
"""

import statistics
import time

from headrace.engine.batch import SampledTokens, ScheduledBatch
from headrace.engine.engine import Engine, EngineLimits
from headrace.engine.kv.block_manager import BlockManager
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.scheduler import Scheduler, SchedulerLimits
from headrace.engine.sequence import Sequence

VOCABULARY = 50_000
PREFIX = 512
BLOCK = 16


class Tokenizer:
    vocab_size = VOCABULARY
    special_token_ids: dict[str, int] = {}  # noqa: RUF012

    def text_bytes(self, token_id: int) -> bytes:
        return b" word"


class Done:
    def __init__(self, batch: ScheduledBatch) -> None:
        self._batch = batch

    def result(self) -> SampledTokens:
        return SampledTokens({row.seq_id: [7] for row in self._batch.rows if row.samples})


class NoRunner:
    def execute(self, batch: ScheduledBatch) -> Done:
        return Done(batch)


def engine(running: int) -> Engine:
    num_blocks = PREFIX // BLOCK + running * 40
    limits = EngineLimits(16_384, running, 4096, num_blocks, BLOCK, VOCABULARY)
    scheduler = Scheduler(SchedulerLimits(running, 4096), BlockManager(num_blocks, BLOCK))
    return Engine(scheduler, NoRunner(), Tokenizer(), limits, eos_token_ids=(2,))


def sequence(index: int, stop: tuple[str, ...]) -> Sequence:
    prompt = [*range(PREFIX), index % VOCABULARY, *range(index % 97, index % 97 + 64)]
    params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True, stop=stop)
    return Sequence(str(index), prompt, params)


def measure(running: int, waiting: int, stop: tuple[str, ...] = (), steps: int = 200) -> float:
    """Microseconds for each running sequence of one step."""
    subject = engine(running)
    for index in range(running + waiting):
        subject.add(sequence(index, stop))
    while subject._scheduler.num_running < running:
        subject.step()
    for _ in range(3):
        subject.step()
    times = []
    for _ in range(steps):
        started = time.process_time()
        subject.step()
        times.append(time.process_time() - started)
    return statistics.median(times) / running * 1e6


def main() -> None:
    for running in (64, 256, 1024):
        print(f"{running:5d} running, 10 waiting: {measure(running, 10):6.2f} us each")
    print(f"   64 running, 100,000 waiting: {measure(64, 100_000):6.2f} us each")
    print(f"   64 running, stop strings: {measure(64, 10, ('###', 'User:')):6.2f} us each")


if __name__ == "__main__":
    main()
