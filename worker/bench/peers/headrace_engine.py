"""Our engine alone: all requests added at once, stepped until done."""

import time

from headrace.worker.bench.peers.protocol import Options, PeerRequest, Run, Runner, serve


def load(options: Options) -> tuple[str, Runner]:
    import torch

    from headrace.engine.config import EngineConfig
    from headrace.engine.engine import Engine
    from headrace.engine.sampling_params import SamplingParams
    from headrace.engine.sequence import Sequence

    quantization = None
    dtype = options.dtype
    if dtype not in ("float32", "bfloat16", "float16", "auto"):
        quantization, dtype = dtype, "auto"
    pool = options.extra.get("kv_cache_memory")
    engine = Engine.load(
        EngineConfig(
            model=options.model,
            dtype=dtype,  # type: ignore[arg-type]
            quantization=quantization,
            num_threads=options.threads,
            max_num_seqs=int(options.extra.get("max_num_seqs", 64)),
            enable_prefix_caching=options.extra.get("prefix_caching", "1") == "1",
            enable_shared_prefix_attention=options.extra.get("shared_prefix", "1") == "1",
            kv_cache_memory_bytes=None if pool is None else int(pool),
            deduplicate=False,
            deterministic=options.extra.get("deterministic") == "1",
        )
    )
    turn = 0

    def run(requests: list[PeerRequest]) -> Run:
        nonlocal turn
        # A new salt empties the prefix cache for this run: nothing of an earlier run is found.
        turn += 1
        salt = f"run-{turn}".encode()
        started = time.perf_counter()
        sequences = []
        for request in requests:
            sequence = Sequence(
                request_id=str(request.id),
                prompt_token_ids=request.prompt_token_ids,
                params=SamplingParams(
                    temperature=0.0,
                    max_tokens=request.max_tokens,
                    ignore_eos=True,
                ),
                salt=salt,
            )
            engine.add(sequence)
            sequences.append(sequence)
        first = None
        steps = queries = hits = 0
        host = 0.0
        while engine.has_unfinished:
            output = engine.step()
            if first is None and output.stats.num_output_tokens:
                first = time.perf_counter() - started
            steps += 1
            host += output.stats.host_seconds
            queries += output.stats.prefix_cache_queries
            hits += output.stats.prefix_cache_hits
        seconds = time.perf_counter() - started
        return Run(
            seconds,
            [sequence.output_token_ids for sequence in sequences],
            first,
            {
                "steps": steps,
                "host_seconds": host,
                "prefix_cache_queries": queries,
                "prefix_cache_hits": hits,
            },
        )

    return f"headrace, torch {torch.__version__}", run


if __name__ == "__main__":
    serve(load)
