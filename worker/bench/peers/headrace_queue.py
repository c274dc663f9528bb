"""Our engine through the real queue: a private Redis, a worker process, and a client.

Each run starts a new worker, so that its prefix cache is empty, and waits until it is ready; the
clock runs from the first submit to the last result read.
"""

import tempfile
import time
from pathlib import Path

from headrace.worker.bench.peers.protocol import Options, PeerRequest, Run, Runner, serve

QUEUE = "bench"
PASSED_ON = ("--checkpoint-every", "--max-num-batched-tokens", "--kv-cache-memory")


def load(options: Options) -> tuple[str, Runner]:
    import psutil

    from headrace.producer import Client
    from headrace.producer.local import LocalWorker, WorkerOptions
    from headrace.producer.redis_server import PrivateRedis
    from headrace.producer.schemas import Result

    folder = Path(tempfile.mkdtemp(prefix="headrace-bench-"))
    server = PrivateRedis().start()
    client = Client(server.url)
    arguments = [
        *("--dtype", options.dtype, "--num-threads", str(options.threads)),
        *("--max-num-seqs", options.extra.get("max_num_seqs", "64")),
    ]
    if options.dtype not in ("float32", "bfloat16", "float16", "auto"):
        arguments[:2] = ["--quantization", options.dtype]
    for name, value in options.extra.items():
        option = f"--{name.replace('_', '-')}"
        if option in PASSED_ON:
            arguments += [option, value]
    if options.extra.get("deterministic") == "1":
        arguments.append("--deterministic")
    chosen = WorkerOptions(options.model, QUEUE, tuple(arguments))
    turn = 0
    peak = 0

    def run(requests: list[PeerRequest]) -> Run:
        nonlocal turn, peak
        turn += 1
        batch = f"run-{turn}"
        worker = LocalWorker(chosen, server.url, folder / "worker.log", name=batch)
        worker.watch()
        while not any(w.state == "ready" for w in client.workers()):
            worker.watch()
            time.sleep(0.05)
        started = time.perf_counter()
        jobs = client.submit_many(
            [
                {"prompt": request.prompt_token_ids, "max_tokens": request.max_tokens}
                for request in requests
            ],
            queue=QUEUE,
            batch=batch,
            temperature=0.0,
            ignore_eos=True,
        )
        results: dict[str, Result | None] = {}
        cursor = 0
        first = None
        while len(results) < len(jobs):
            done = client.completed(batch, cursor)
            cursor = done.cursor
            results.update(done.items)
            if not done.items:
                time.sleep(0.05)
        seconds = time.perf_counter() - started
        for process in psutil.Process().children(recursive=True):
            try:
                if "worker" in process.cmdline():
                    peak = max(peak, _peak_rss(process.pid))
            except psutil.NoSuchProcess:
                continue
        worker.stop(10.0)
        outputs = []
        for job in jobs:
            result = results[job.id]
            if result is None or not result.ok:
                raise RuntimeError(f"{job.id} has no answer: {result and result.failure}")
            outputs.append(result.choices[0].token_ids or [])
            if result.timing is not None:
                reached = result.timing.queued + result.timing.first_token
                first = reached if first is None else min(first, reached)
        client.forget([job.id for job in jobs])
        return Run(seconds, outputs, first, peak_rss_bytes=peak)

    return "headrace through Redis", run


def _peak_rss(pid: int) -> int:
    """VmHWM of another process, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    serve(load)
