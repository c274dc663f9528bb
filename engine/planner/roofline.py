"""How long a step takes: the larger of moving its bytes and doing its arithmetic, plus a constant.

    seconds = max(bytes / bandwidth / memory_efficiency, operations / peak / compute_efficiency)
              + overhead + communication

after Williams et al., Roofline (2009). The three constants are defaults for a well-tuned engine
until `calibration` fits them to measurements of the same card.
"""

from dataclasses import dataclass
from functools import lru_cache

from headrace.engine.planner.hardware import Card
from headrace.engine.planner.kv import KVType, kv_sequence_bytes
from headrace.engine.planner.schemes import Scheme
from headrace.engine.planner.shapes import ModelShape
from headrace.engine.planner.weights import WeightBytes

_FAST_LINK = 100e9
_FAST_LATENCY = 8e-6
_SLOW_LATENCY = 25e-6
WEIGHT_ONLY_COMPUTE = 0.85
"""Arithmetic rate of a matmul that unpacks its weights, beside one that does not."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the data sheet's bandwidth and arithmetic that are reached, seconds a step beside.

    `points` is the number of measurements behind it, 0 for the defaults.
    """

    memory: float = 0.75
    compute: float = 0.55
    overhead: float = 1.2e-3
    points: int = 0

    @property
    def basis(self) -> str:
        return f"calibrated on {self.points} measurements" if self.points else "roofline defaults"


GPU_DEFAULT = Efficiency()
CPU_DEFAULT = Efficiency(memory=0.7, compute=0.7, overhead=5e-3)
IDEAL = Efficiency(memory=1.0, compute=1.0, overhead=0.0)


def default_efficiency(card: Card) -> Efficiency:
    return CPU_DEFAULT if card.is_cpu else GPU_DEFAULT


@dataclass(frozen=True, slots=True)
class StepWork:
    """Seconds of one step's parts at the data sheet's rates."""

    memory: float
    compute: float
    communication: float

    def seconds(self, efficiency: Efficiency) -> float:
        bound = max(self.memory / efficiency.memory, self.compute / efficiency.compute)
        return bound + efficiency.overhead + self.communication


@lru_cache(maxsize=64)
def _active_params(shape: ModelShape) -> int:
    return shape.num_active_linear_params


@dataclass(frozen=True, slots=True)
class Roofline:
    """One model in one scheme on `tp` cards that work as one. `weights` are those of one card."""

    shape: ModelShape
    scheme: Scheme
    weights: WeightBytes
    card: Card
    kv_type: KVType = "16-bit"
    tp: int = 1

    def decode(self, batch: int, context: float, shared_prefix: int = 0) -> StepWork:
        """A step that gives each of `batch` sequences one token, `context` tokens behind each.

        The first `shared_prefix` of them are common to all and read once.
        """
        own = self._kv_bytes(context) - self._kv_bytes(shared_prefix)
        read = self.weights.read_per_step(self._experts_touched(batch))
        read += self._kv_bytes(shared_prefix) + batch * own
        attention = 4.0 * batch * context * self.shape.q_size * self.shape.num_layers / self.tp
        compute = self._linear_seconds(batch, batch) + attention / self._float_rate()
        return StepWork(read / self.card.bandwidth, compute, self._communication(batch))

    def prefill(self, tokens: int, context: float = 0.0, sequences: int = 1) -> StepWork:
        """A step over `tokens` prompt tokens of `sequences` prompts, `context` computed before.

        Causal attention: token i of a prompt sees the context and i tokens more.
        """
        seen = context + tokens / sequences / 2
        attention = 4.0 * tokens * seen * self.shape.q_size * self.shape.num_layers / self.tp
        compute = self._linear_seconds(tokens, sequences) + attention / self._float_rate()
        read = self.weights.read_per_step(self._experts_touched(tokens))
        read += sequences * self._kv_bytes(context + tokens / sequences)
        return StepWork(read / self.card.bandwidth, compute, self._communication(tokens))

    def _kv_bytes(self, tokens: float) -> int:
        return kv_sequence_bytes(self.shape, round(tokens), self.kv_type, self.tp)

    def _experts_touched(self, tokens: int) -> float:
        """Expected share of the experts that `tokens` independent tokens reach."""
        if not self.shape.num_experts:
            return 1.0
        miss = 1 - self.shape.experts_per_token / self.shape.num_experts
        return 1.0 - float(miss**tokens)

    def _float_rate(self) -> float:
        name = self.scheme.name if self.scheme.kind == "float" else self.card.float_dtype
        return self.card.flops[name]

    def _linear_seconds(self, tokens: int, rows_of_head: int) -> float:
        """The layers' matrices for every token, the head for the rows that are sampled."""
        head = 2.0 * rows_of_head * self.shape.embedding().num_params / self.tp
        layers = 2.0 * tokens * _active_params(self.shape) / self.tp
        if self.scheme.compute == "float":
            rate = self._float_rate()
            rate *= WEIGHT_ONLY_COMPUTE if self.scheme.weight_only else 1.0
        else:
            rate = self.card.flops[self.scheme.compute]
        return layers / rate + head / self._float_rate()

    def _communication(self, tokens: int) -> float:
        """Two all-reduces a layer over the hidden states, as rings."""
        if self.tp == 1:
            return 0.0
        size = tokens * self.shape.hidden_size * self.card.dtype_bytes
        latency = _FAST_LATENCY if self.card.link > _FAST_LINK else _SLOW_LATENCY
        ring = 2 * (self.tp - 1) / self.tp * size / self.card.link
        return 2 * self.shape.num_layers * (latency + ring)
