"""Every way to run a job: card, count and scheme, each priced, timed and with its reason."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from headrace.engine.planner.errors import PlanError
from headrace.engine.planner.hardware import Card
from headrace.engine.planner.job import INTERRUPTIONS_PER_HOUR, Job, JobTime, job_time, spot_seconds
from headrace.engine.planner.kv import KVType, kv_bytes_per_token
from headrace.engine.planner.memory import (
    WEIGHTS_SHARE,
    MemoryPlan,
    Settings,
    max_sequences,
    plan_memory,
)
from headrace.engine.planner.prices import Price
from headrace.engine.planner.resolve import Model
from headrace.engine.planner.roofline import Efficiency, Roofline, default_efficiency
from headrace.engine.planner.schemes import Scheme, parse_scheme
from headrace.engine.planner.support import TENSOR_PARALLEL, not_runnable
from headrace.engine.planner.weights import WeightBytes, share, split_problem, weight_bytes

SIXTEEN_BIT = "16-bit"
"""The card's own 16-bit type (bf16, or fp16 where there is no bf16); float32 on most CPUs."""
DEFAULT_SCHEMES = (SIXTEEN_BIT, "int8", "int8-dynamic", "int4-g128")
DEFAULT_COUNTS = (1, 2, 4, 8)
_GIB = 2**30
_AS_FAST = 1.05


@dataclass(frozen=True, slots=True)
class Candidate:
    """One row of a plan. Bytes are those on each card; times and costs those of the whole job."""

    model: str
    gpu: str
    count: int
    tensor_parallel: int
    scheme: str
    bits: int
    weights_bytes: int
    kv_bytes_per_token: int
    kv_type: str
    max_sequences: int
    fits: bool
    runnable: bool
    reason: str
    memory: MemoryPlan | None = None
    time: JobTime | None = None
    seconds: float | None = None
    cost: float | None = None
    spot_seconds: float | None = None
    spot_cost: float | None = None
    meets_deadline: bool = False
    weights_share: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def kv_bytes(self) -> int:
        """What is left for keys and values; 0 where the scheme or the split is impossible."""
        return 0 if self.memory is None else self.memory.kv

    @property
    def follows_70_30(self) -> bool:
        return 0 < self.weights_share <= WEIGHTS_SHARE

    @property
    def key(self) -> tuple[str, str, int, str]:
        return self.model, self.gpu, self.count, self.scheme


@dataclass(frozen=True, slots=True)
class Options:
    """What is compared, and under which assumptions."""

    job: Job
    settings: Settings
    cards: Sequence[Card]
    prices: Mapping[str, Price]
    schemes: Sequence[str] = ()
    counts: Sequence[int] = DEFAULT_COUNTS
    tensor_parallel: int | None = None
    efficiencies: Mapping[str, Efficiency] = field(default_factory=dict)
    interruptions_per_hour: float = INTERRUPTIONS_PER_HOUR

    def efficiency(self, card: Card) -> Efficiency:
        return self.efficiencies.get(card.name) or default_efficiency(card)


def candidates(model: Model, options: Options) -> list[Candidate]:
    """A row for each card, count and scheme."""
    rows: list[Candidate] = []
    check_length(model, options.job)
    for card in options.cards:
        for scheme in _schemes(model, card, options.schemes):
            counts = (1,) if card.is_cpu else options.counts
            rows.extend(_Case(model, card, scheme, options).row(count) for count in counts)
    return rows


def check_length(model: Model, job: Job) -> None:
    """Raises PlanError when the model has not that many positions."""
    limit = model.shape.max_position_embeddings
    if job.length > limit and not model.assumed:
        raise PlanError(
            f"{model.shape.name} takes {limit:,} positions; prompt {job.prompt:,} and output "
            f"{job.output:,} need {job.length:,}"
        )


def _schemes(model: Model, card: Card, wanted: Iterable[str]) -> list[Scheme]:
    """The schemes asked for; else the checkpoint's own, or the usual ones.

    A GGUF file is also planned dequantized, which is how it runs where nothing reads it packed.
    """
    names = list(wanted)
    if not names and model.quantized is not None:
        gguf = model.quantized.kind == "gguf"
        names = [model.quantized.name, SIXTEEN_BIT] if gguf else [model.quantized.name]
    found = []
    for name in names or DEFAULT_SCHEMES:
        if name in (SIXTEEN_BIT, "auto"):
            scheme = parse_scheme(card.float_dtype)
        elif model.quantized is not None and name == model.quantized.name:
            scheme = model.quantized
        else:
            scheme = parse_scheme(name)
        if scheme not in found:
            found.append(scheme)
    return found


@dataclass(frozen=True, slots=True)
class _Case:
    model: Model
    card: Card
    scheme: Scheme
    options: Options

    @property
    def kv_type(self) -> KVType:
        chosen = self.options.settings.kv_type
        return "fp32" if chosen == "16-bit" and self.card.dtype_bytes == 4 else chosen

    def weights(self, tp: int) -> WeightBytes:
        """The files' own bytes where the scheme is the checkpoint's, else computed."""
        stored = self.model.stored
        if stored is not None and stored.scheme.name == self.scheme.name:
            return share(stored.weights, tp)
        return weight_bytes(self.model.shape, self.scheme, self.card.dtype_bytes, tp)

    def row(self, count: int) -> Candidate:
        """The best division of `count` cards into equal groups that split the model.

        Whole models come first as long as splits do not run; then the fastest, and the narrowest
        unless a wider one is 5 % faster. When none fits, the widest split that is possible.
        """
        forced = self.options.tensor_parallel
        refusal = self.card.refuses(self.scheme)
        if forced is not None and count % forced:
            refusal = refusal or f"{count} cards are no multiple of the split of {forced}"
        widths = [forced or 1] if refusal else self.widths(count)
        rows = [self.at(count, width, refusal) for width in widths]
        fitting = [r for r in rows if r.fits]
        if fitting and (fitting[0].tensor_parallel == 1 and not TENSOR_PARALLEL):
            return fitting[0]
        if fitting:
            fastest = min(r.seconds or 0.0 for r in fitting)
            return next(r for r in fitting if (r.seconds or 0.0) <= _AS_FAST * fastest)
        possible = [r for r in rows if r.memory is not None]
        if not possible:
            return rows[0]
        problems = [r.reason for r in rows if r.memory is None]
        last = possible[-1]
        return replace(last, reason="; ".join([last.reason, *problems[:1]]))

    def widths(self, count: int) -> list[int]:
        if self.options.tensor_parallel is not None:
            return [self.options.tensor_parallel]
        return [w for w in range(1, count + 1) if count % w == 0]

    def at(self, count: int, tp: int, refusal: str | None) -> Candidate:
        shape, settings, job = self.model.shape, self.options.settings, self.options.job
        problem = refusal or split_problem(shape, self.scheme, tp)
        missing = not_runnable(shape, self.card, self.scheme, tp, job.length)
        weights = self.weights(1 if problem else tp)
        base = Candidate(
            model=shape.name,
            gpu=self.card.name,
            count=count,
            tensor_parallel=tp,
            scheme=self.scheme.name,
            bits=self.scheme.bits,
            weights_bytes=weights.total,
            kv_bytes_per_token=kv_bytes_per_token(shape, self.kv_type, 1 if problem else tp),
            kv_type=self.kv_type,
            max_sequences=0,
            fits=False,
            runnable=not missing and problem is None,
            reason=problem or "",
            notes=self.notes(missing),
        )
        if problem:
            return base
        memory = plan_memory(shape, self.scheme, weights.total, self.card, settings, tp)
        held = max_sequences(
            shape, memory.kv, job.length, settings, self.kv_type, tp, job.shared_prefix
        )
        row = replace(
            base,
            memory=memory,
            max_sequences=held,
            fits=held > 0,
            weights_share=weights.total / self.card.memory,
        )
        if not held:
            return replace(row, reason=self.shortfall(memory, job))
        return self.timed(row, weights, count // tp)

    def timed(self, row: Candidate, weights: WeightBytes, workers: int) -> Candidate:
        job, options, tp = self.options.job, self.options, row.tensor_parallel
        roofline = Roofline(self.model.shape, self.scheme, weights, self.card, self.kv_type, tp)
        efficiency = options.efficiency(self.card)
        time = job_time(job, options.settings, roofline, efficiency, row.max_sequences, workers)
        spot = spot_seconds(time, tp, options.interruptions_per_hour)
        price = options.prices.get(self.card.name)
        hours = row.count / 3600
        return replace(
            row,
            time=time,
            seconds=time.total,
            cost=price.on_demand * hours * time.total if price else None,
            spot_seconds=spot,
            spot_cost=price.spot * hours * spot if price else None,
            meets_deadline=job.deadline is None or time.total <= job.deadline,
            reason=self.fit_reason(row),
        )

    def notes(self, missing: tuple[str, ...]) -> tuple[str, ...]:
        notes = missing
        if self.card.float_dtype == "fp16" and self.model.shape.overflows_fp16:
            notes += (f"{self.model.shape.model_type} may overflow fp16: check for NaN",)
        return notes

    def shortfall(self, memory: MemoryPlan, job: Job) -> str:
        spent = memory.weights + memory.run_time
        if memory.kv <= 0:
            return (
                f"weights {memory.weights / _GIB:.2f} GiB and run time "
                f"{memory.run_time / _GIB:.2f} GiB exceed the {memory.usable / _GIB:.2f} GiB "
                f"usable by {(spent - memory.usable) / _GIB:.2f} GiB"
            )
        return f"{memory.kv / _GIB:.2f} GiB left for KV hold no sequence of {job.length:,} tokens"

    def fit_reason(self, row: Candidate) -> str:
        """Memory first, then the 70/30 check."""
        check = "70/30 rule holds" if row.follows_70_30 else "70/30 rule broken"
        parts = [
            f"{row.max_sequences} sequences fit",
            f"weights {row.weights_share:.0%} of the card ({check})",
        ]
        if row.tensor_parallel > 1:
            parts.insert(0, f"split over {row.tensor_parallel} cards")
        workers = row.count // row.tensor_parallel
        if workers > 1:
            parts.insert(0, f"{workers} workers")
        return "; ".join([*parts, *row.notes])
