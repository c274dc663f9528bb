"""The items of `make bench-gpu` in their order, and the process that runs one of them:
`python -m headrace.worker.bench.gpu.items NAME --out FILE [--tiny]`."""

import argparse
import importlib
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Item:
    """`seconds`: most that it may take. `interpreted`: in a rehearsal it needs Triton's
    interpreter, since it launches kernels itself."""

    name: str
    title: str
    module: str
    function: str
    seconds: float
    interpreted: bool = False


ITEMS = (
    Item("tests", "Kernel tests, compiled", "kernel_tests", "run", 140, interpreted=True),
    Item("linear", "Packed linear layers", "packed", "run", 60, interpreted=True),
    Item("large", "Qwen3-8B shape, 256 x 1024/1024", "engines", "large", 120),
    Item("small", "Qwen3-0.6B shape, nano-vllm's mix", "engines", "small", 60),
    Item("prefix", "2,048 tokens shared by 256", "engines", "prefix", 60),
    Item("kernels", "Kernels", "kernels", "run", 60, interpreted=True),
    Item("transformers", "Transformers' continuous batching", "beside_transformers", "run", 120),
    Item("queue", "Through the queue", "through_queue", "run", 80),
    Item("deterministic", "Deterministic, Qwen3-8B shape", "engines", "large_deterministic", 120),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one item in this process; exit status 1 when it failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=[item.name for item in ITEMS])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    item = next(item for item in ITEMS if item.name == options.name)

    import torch

    from headrace.engine.errors import EngineError
    from headrace.worker.bench.gpu.device import Device
    from headrace.worker.bench.gpu.kernel_tests import NotHere
    from headrace.worker.bench.gpu.record import Record

    on_gpu = torch.cuda.is_available() and not options.tiny
    where = Device(torch.device("cuda" if on_gpu else "cpu"), options.tiny)
    record = Record(options.out, item.name, judged=not options.tiny)
    try:
        module = importlib.import_module(f"headrace.worker.bench.gpu.{item.module}")
        getattr(module, item.function)(where, record)
    except (NotHere, ImportError) as missing:
        record.end("not run", reason=str(missing))
        return 0
    except EngineError as error:
        record.end("not run", reason=str(error))
        return 1
    except Exception as error:
        record.end(
            "failed", reason=f"{type(error).__name__}: {error}", trace=traceback.format_exc()
        )
        return 1
    record.end("done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
