"""What is measured of each engine step and of each sequence that ends. Knows no queue."""

from headrace.engine.sequence import Sequence
from headrace.engine.stats import StepStats
from headrace.worker.metrics import WorkerMetrics
from headrace.worker.rates import ServiceRates


class StepMetrics:
    """`rates`: how fast the engine has been lately."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self.rates = ServiceRates()
        self._metrics = metrics

    def step(self, stats: StepStats, seconds: float) -> None:
        """One step and its wall time."""
        m = self._metrics
        m.running.set(stats.num_running)
        m.waiting.set(stats.num_waiting)
        m.kv_usage.set(stats.kv_usage)
        m.prompt_tokens.inc(stats.num_prompt_tokens)
        m.generation_tokens.inc(stats.num_output_tokens)
        if stats.num_preemptions:
            m.preemptions.inc(stats.num_preemptions)
        if stats.prefix_cache_queries:
            m.prefix_queries.inc(stats.prefix_cache_queries)
            m.prefix_hits.inc(stats.prefix_cache_hits)
        m.step_tokens.observe(stats.num_scheduled_tokens)
        m.step_seconds.observe(seconds)
        self.rates.observe(stats.num_prompt_tokens, stats.num_output_tokens, seconds)

    def idle(self) -> None:
        """The engine has nothing to do."""
        self._metrics.running.set(0)
        self._metrics.waiting.set(0)
        self._metrics.kv_usage.set(0.0)

    def ended(self, sequence: Sequence) -> None:
        if not sequence.first_token_time or not sequence.finish_time:
            return
        self._metrics.first_token.observe(sequence.first_token_time - sequence.arrival_time)
        tokens = len(sequence.output_token_ids) - 1
        if tokens > 0:
            seconds = sequence.finish_time - sequence.first_token_time
            self._metrics.inter_token.observe(max(0.0, seconds) / tokens)
