"""Transformers' `generate` in static batches of 16, left-padded, on the same weights."""

import time

from headrace.worker.bench.peers.protocol import Options, PeerRequest, Run, Runner, serve


def load(options: Options) -> tuple[str, Runner]:
    from pathlib import Path

    import torch
    import transformers

    torch.set_num_threads(options.threads)
    size = int(options.extra.get("batch", "16"))
    path = Path(options.model)
    source: dict[str, str] = {}
    folder = path
    if path.suffix == ".gguf":
        folder, source = path.parent, {"gguf_file": path.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, options.dtype), **source
    )
    model.eval()

    class Clock(transformers.StoppingCriteria):  # type: ignore[misc]
        first: float | None = None

        def __call__(
            self, input_ids: "torch.Tensor", scores: object, **_: object
        ) -> "torch.Tensor":
            if self.first is None:
                self.first = time.perf_counter()
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    def run(requests: list[PeerRequest]) -> Run:
        clock = Clock()
        outputs: list[list[int]] = []
        started = time.perf_counter()
        for start in range(0, len(requests), size):
            batch = requests[start : start + size]
            width = max(len(r.prompt_token_ids) for r in batch)
            ids = torch.zeros(len(batch), width, dtype=torch.long)
            mask = torch.zeros(len(batch), width, dtype=torch.long)
            for row, request in enumerate(batch):
                prompt = torch.tensor(request.prompt_token_ids)
                ids[row, width - len(prompt) :] = prompt
                mask[row, width - len(prompt) :] = 1
            longest = max(r.max_tokens for r in batch)
            with torch.inference_mode():
                out = model.generate(
                    ids,
                    attention_mask=mask,
                    do_sample=False,
                    max_new_tokens=longest,
                    min_new_tokens=longest,
                    stopping_criteria=[clock],
                    pad_token_id=0,
                )
            for row, request in enumerate(batch):
                outputs.append(out[row, width : width + request.max_tokens].tolist())
        seconds = time.perf_counter() - started
        first = None if clock.first is None else clock.first - started
        return Run(seconds, outputs, first)

    return f"transformers {transformers.__version__}, torch {torch.__version__}", run


if __name__ == "__main__":
    serve(load)
