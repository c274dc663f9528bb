"""vLLM's CPU build, in this process: one engine, all requests handed over at once.

The platform that it reports is part of the version: zentorch that is not found is not used, and
vLLM does not say so.
"""

import os
import time

from headrace.worker.bench.peers.protocol import (
    Options,
    PeerRequest,
    Run,
    Runner,
    fast_float,
    serve,
)


def load(options: Options) -> tuple[str, Runner]:
    cpus = sorted(os.sched_getaffinity(0))[: options.threads]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cpus)))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", options.extra.get("kv_gib", "4"))
    # In this process, so that the peak memory is this process's.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch
    import vllm  # type: ignore[import-not-found]
    from vllm.platforms import current_platform  # type: ignore[import-not-found]

    torch.set_num_threads(options.threads)
    caching = options.extra.get("prefix_caching", "1") == "1"
    engine = vllm.LLM(
        model=options.model,
        # What is not in INT8 layers: attention, norms, the head.
        dtype=fast_float() if options.dtype == "int8" else options.dtype,
        max_num_seqs=int(options.extra.get("max_num_seqs", "64")),
        max_num_batched_tokens=int(options.extra.get("max_num_batched_tokens", "2048")),
        enable_prefix_caching=caching,
        seed=0,
    )

    def run(requests: list[PeerRequest]) -> Run:
        if caching and engine.reset_prefix_cache() is False:
            raise RuntimeError("vLLM did not empty its prefix cache")
        prompts = [{"prompt_token_ids": request.prompt_token_ids} for request in requests]
        settings = [
            vllm.SamplingParams(temperature=0.0, max_tokens=r.max_tokens, ignore_eos=True)
            for r in requests
        ]
        started = time.perf_counter()
        answers = engine.generate(prompts, settings, use_tqdm=False)
        seconds = time.perf_counter() - started
        return Run(seconds, [list(answer.outputs[0].token_ids) for answer in answers])

    platform = type(current_platform).__name__
    return f"vllm {vllm.__version__} ({platform}), torch {torch.__version__}", run


if __name__ == "__main__":
    serve(load)
