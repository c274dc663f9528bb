"""Transformers' own continuous batching with its paged cache, on the same weights."""

import time

from headrace.worker.bench.peers.protocol import Options, PeerRequest, Run, Runner, serve


def load(options: Options) -> tuple[str, Runner]:
    from pathlib import Path

    import torch
    import transformers

    torch.set_num_threads(options.threads)
    page = int(options.extra.get("page_size", "16"))
    most = int(options.extra.get("max_batch_tokens", "2048"))
    path = Path(options.model)
    source: dict[str, str] = {}
    folder = path
    if path.suffix == ".gguf":
        folder, source = path.parent, {"gguf_file": path.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=getattr(torch, options.dtype),
        attn_implementation="sdpa",
        **source,
    )
    model.eval()

    def run(requests: list[PeerRequest]) -> Run:
        # A manager of its own for each run: its cache holds nothing of an earlier one.
        blocks = sum(-(-(len(r.prompt_token_ids) + r.max_tokens) // page) + 1 for r in requests)
        manager = model.init_continuous_batching(
            transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            transformers.ContinuousBatchingConfig(
                page_size=page, num_blocks=blocks, max_batch_tokens=most
            ),
        )
        manager.start()
        started = time.perf_counter()
        for request in requests:
            manager.add_request(
                request.prompt_token_ids,
                request_id=str(request.id),
                max_new_tokens=request.max_tokens,
                eos_token_id=-1,
            )
        outputs: dict[str, list[int]] = {}
        while len(outputs) < len(requests):
            result = manager.get_result(timeout=1.0)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("the generation thread has ended")
                continue
            if result.error:
                raise RuntimeError(result.error)
            outputs[result.request_id] = list(result.generated_tokens)
        seconds = time.perf_counter() - started
        manager.stop(block=True)
        return Run(seconds, [outputs[str(request.id)] for request in requests])

    return f"transformers {transformers.__version__}, torch {torch.__version__}", run


if __name__ == "__main__":
    serve(load)
