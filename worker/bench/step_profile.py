"""Where a step's time goes, part by part, as wall time on the CPU.

While it profiles, it puts clocks around the engine's own parts and takes them away afterwards:
nothing else of the package reaches into them. On a CPU launching is computing, so wall time is
right; on a device that computes later it would not be.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.engine.engine import Engine
from headrace.engine.stopping import StopChecker
from headrace.worker.bench import trial
from headrace.worker.bench.report import figure, markdown
from headrace.worker.bench.workloads import BenchRequest

PARTS = (
    "schedule",
    "inputs",
    "linears",
    "attention",
    "elementwise",
    "head",
    "sampler",
    "detokenize",
    "rest",
)
HOST_PARTS = ("schedule", "inputs", "sampler", "detokenize", "rest")
"""All but the model's arithmetic."""


@dataclass(slots=True)
class Clock:
    """Seconds by part. Parts do not nest: an inner one is taken off the outer one."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _inner: list[float] = field(default_factory=lambda: [0.0])

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            started = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                taken = time.perf_counter() - started
                inner = self._inner.pop()
                self.seconds[part] += taken - inner
                self._inner[-1] += taken

        return wrapper

    def take(self) -> dict[str, float]:
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken


@dataclass(slots=True)
class Phase:
    """Steps of one kind: how many, how many tokens they computed, and seconds by part."""

    steps: int = 0
    tokens: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def add(self, tokens: int, whole: float, parts: Mapping[str, float]) -> None:
        self.steps += 1
        self.tokens += tokens
        for part, seconds in parts.items():
            self.seconds[part] += seconds
        self.seconds["rest"] += max(0.0, whole - sum(parts.values()))

    def summary(self) -> dict[str, Any]:
        total = self.total or 1.0
        host = sum(self.seconds[part] for part in HOST_PARTS)
        return {
            "steps": self.steps,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "total_s": self.total,
            "host_share": host / total,
        }


def run(
    engine: Engine,
    requests: Sequence[BenchRequest],
    sampling: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """Profile one trial after one that warms up; greedy without `sampling`. `prefill`: steps
    that computed tokens of a prompt (and decoded beside that); `decode`: only decoded."""
    trial.run(engine, requests[:2])
    phases = {"prefill": Phase(), "decode": Phase()}
    salt = trial.new_salt()
    with clocked(engine) as clock:
        for request in requests:
            engine.add(trial.sequence(request, salt, sampling))
        clock.take()
        while engine.has_unfinished:
            started = time.perf_counter()
            stats = engine.step().stats
            whole = time.perf_counter() - started
            phase = phases["prefill" if stats.num_prompt_tokens else "decode"]
            phase.add(stats.num_scheduled_tokens, whole, clock.take())
    return {name: phase.summary() for name, phase in phases.items()}


@contextmanager
def clocked(engine: Engine) -> Iterator[Clock]:
    """Clocks around the parts of `engine` while inside."""
    clock = Clock()
    runner: Any = engine.runner
    decoder, backend, rows = runner._decoder, runner._backend, runner._rows
    with ExitStack() as undo:

        def wrap(owner: Any, part: str, *names: str) -> None:
            for name in names:
                before = getattr(owner, name)
                own = name in getattr(owner, "__dict__", {})
                setattr(owner, name, clock.timed(part, before))
                undo.callback(setattr, owner, name, before) if own else undo.callback(
                    delattr, owner, name
                )

        wrap(engine._scheduler, "schedule", "schedule", "update")
        wrap(rows, "inputs", "update", "step_inputs", "append")
        wrap(backend, "inputs", "prepare")
        wrap(backend, "attention", "attention", "rope_and_store")
        wrap(backend, "elementwise", "rms_norm", "add_rms_norm", "silu_mul")
        wrap(runner._sampler, "sampler", "sample")
        wrap(decoder, "elementwise", "_embedding")
        wrap(decoder, "head", "_head")
        layers = decoder._layers
        undo.callback(setattr, decoder, "_layers", layers)
        decoder._layers = [
            replace(
                layer,
                **{
                    name: clock.timed("linears", getattr(layer, name))
                    for name in ("qkv", "output", "gate_up", "down")
                },
            )
            for layer in layers
        ]
        check = StopChecker.check
        undo.callback(setattr, StopChecker, "check", check)
        StopChecker.check = clock.timed("detokenize", check)  # type: ignore[method-assign]
        yield clock


def table(result: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: milliseconds a step and share of it, for both kinds of steps."""
    rows: list[list[str]] = []
    for part in PARTS:
        cells = [part]
        for phase in result.values():
            steps, total = max(phase["steps"], 1), phase["total_s"] or 1.0
            seconds = phase["seconds"][part]
            cells += [figure(1e3 * seconds / steps), f"{seconds / total:.1%}"]
        rows.append(cells)
    whole = ["a step"]
    width = ["tokens a step"]
    host = ["host part (schedule, inputs, sampler, detokenize, rest)"]
    for phase in result.values():
        steps = max(phase["steps"], 1)
        whole += [figure(1e3 * phase["total_s"] / steps), f"{phase['steps']} steps"]
        width += [figure(phase["tokens"] / steps), ""]
        host += ["", f"{phase['host_share']:.1%}"]
    head = ["part"]
    for name in result:
        head += [f"{name} ms", "share"]
    return markdown(head, [*rows, whole, width, host])
