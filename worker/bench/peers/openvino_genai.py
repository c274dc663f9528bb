"""OpenVINO GenAI's continuous batching on the model that optimum exports.

It finds no prefix that another request is computing now, so `staged=1` (the default) runs the first
request before the others are added, as its best setting; `staged=0` adds all at once.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from headrace.worker.bench.peers.protocol import (
    Options,
    PeerRequest,
    Run,
    Runner,
    fast_float,
    serve,
)

_WEIGHTS = {"float32": "fp32", "bfloat16": "fp32", "int8": "int8"}
_HINTS = {"float32": "f32", "bfloat16": "bf16"}


def load(options: Options) -> tuple[str, Runner]:
    import numpy as np
    import openvino  # type: ignore[import-not-found]
    import openvino_genai  # type: ignore[import-not-found]

    folder = _exported(options.model, _WEIGHTS[options.dtype])
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs = int(options.extra.get("max_num_seqs", "64"))
    scheduler.max_num_batched_tokens = int(options.extra.get("max_num_batched_tokens", "1024"))
    scheduler.cache_size = int(options.extra.get("cache_gib", "4"))
    scheduler.enable_prefix_caching = options.extra.get("prefix_caching", "1") == "1"
    properties = {
        "INFERENCE_PRECISION_HINT": _HINTS[
            fast_float() if options.dtype == "int8" else options.dtype
        ],
        "INFERENCE_NUM_THREADS": options.threads,
        "NUM_STREAMS": 1,
    }
    staged = options.extra.get("staged", "1") == "1"

    def run(requests: list[PeerRequest]) -> Run:
        # A pipeline of its own for each run: nothing of an earlier one is in its prefix cache.
        pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(folder), scheduler, "CPU", properties
        )
        handles = {}
        started = time.perf_counter()
        for index, request in enumerate(requests):
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens = config.min_new_tokens = request.max_tokens
            config.ignore_eos = True
            config.do_sample = False
            ids = openvino.Tensor(np.array([request.prompt_token_ids], dtype=np.int64))
            handles[request.id] = pipeline.add_request(index, ids, config)
            if staged and index == 0:
                while pipeline.has_non_finished_requests():
                    pipeline.step()
        while pipeline.has_non_finished_requests():
            pipeline.step()
        seconds = time.perf_counter() - started
        outputs = [list(handles[r.id].read_all()[0].generated_ids) for r in requests]
        return Run(seconds, outputs)

    version = f"openvino {openvino.__version__}, genai {openvino_genai.__version__}"
    return version, run


def _exported(model: str, weights: str) -> Path:
    """The model as OpenVINO reads it, made once beside the folder and kept."""
    target = Path(f"{model.rstrip('/')}-openvino-{weights}")
    if target.is_dir():
        return target
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino"]
        command += ["--model", model, "--task", "text-generation-with-past"]
        command += ["--weight-format", weights, f"{temporary}/exported"]
        subprocess.run(command, check=True, stdout=sys.stderr)
        shutil.move(f"{temporary}/exported", target)
    return target


if __name__ == "__main__":
    serve(load)
