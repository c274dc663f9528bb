"""Runs all items, each in a process of its own, and puts their results together.

`python -m headrace.worker.bench.gpu [--only NAME] [--seconds 480] [--out FOLDER] [--tiny]`. Without
a GPU it rehearses: every item with tiny shapes on the CPU, whose times say nothing. From a checkout
that is not installed: `PYTHONSAFEPATH=1 PYTHONPATH=.typing python -m headrace.worker.bench.gpu`.
Needs torch, triton and what the engine imports; Transformers and Redis only for their own items.
"""

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.worker.bench.gpu.items import ITEMS, Item
from headrace.worker.bench.gpu.table import markdown_report

OUT = Path("build/bench/gpu")
SECONDS = 480.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 when an item failed."""
    parser = argparse.ArgumentParser(description="Measure a GPU in at most eight minutes.")
    parser.add_argument("--only", action="append", choices=[item.name for item in ITEMS])
    parser.add_argument("--seconds", type=float, help="for everything together; 480 on a GPU")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--tiny", action="store_true", help="rehearse with tiny shapes on the CPU")
    options = parser.parse_args(arguments)

    import torch

    from headrace.worker.bench.gpu.device import describe

    tiny = options.tiny or not torch.cuda.is_available()
    options.out.mkdir(parents=True, exist_ok=True)
    about = {
        "device": describe(torch.device("cpu" if tiny else "cuda")),
        "rehearsal": tiny,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _triton_version(),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    end = time.monotonic() + (options.seconds or (math.inf if tiny else SECONDS))
    results: list[dict[str, Any]] = []
    for item in ITEMS:
        if options.only and item.name not in options.only:
            continue
        path = options.out / f"{item.name}.json"
        path.unlink(missing_ok=True)
        left = end - time.monotonic()
        limit = min(left, math.inf if tiny else item.seconds)
        if left < 5:
            results.append({"item": item.name, "status": "not run", "reason": "out of time"})
        else:
            print(f"{item.title} ...", file=sys.stderr, flush=True)
            results.append(_run(item, path, tiny, limit))
        # Written after every item, so that a cut run has a report of what it got to.
        document = {**about, "items": results}
        (options.out / "gpu.json").write_text(json.dumps(document, indent=1) + "\n")
        (options.out / "gpu.md").write_text(markdown_report(document))
    print(markdown_report({**about, "items": results}))
    return int(any(result["status"] in ("failed", "cut") for result in results))


def _run(item: Item, path: Path, tiny: bool, limit: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "headrace.worker.bench.gpu.items", item.name]
    command += ["--out", str(path), *(["--tiny"] if tiny else [])]
    environment = dict(os.environ)
    environment.pop("TRITON_INTERPRET", None)
    if tiny and item.interpreted:
        environment["TRITON_INTERPRET"] = "1"
    log = path.with_suffix(".log")
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            process.wait(None if limit == math.inf else limit)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if not path.exists():
        return {"item": item.name, "status": "failed", "reason": _tail(log)}
    result: dict[str, Any] = json.loads(path.read_text())
    if result["status"] == "running":
        status = "cut" if process.returncode == -9 else "failed"
        result |= {
            "status": status,
            "reason": f"after {limit:.0f} s" if status == "cut" else _tail(log),
        }
    return result


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-1000:]


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "missing"
    return str(triton.__version__)


if __name__ == "__main__":
    sys.exit(main())
