"""Greedy answers of Transformers in float32, with the margin of each decision.

Where the two best logits lie closer than rounding, either token is right, and what follows depends
on it: `check_against` compares up to there.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

MARGIN = 1e-3


@dataclass(frozen=True, slots=True)
class OracleAnswer:
    """`margins[i]`: by how much the best logit beat the second at output i."""

    token_ids: list[int]
    margins: list[float]


def load_oracle(path: Path) -> Any:
    """The model as Transformers itself reads it, from a folder or a GGUF file."""
    from transformers import AutoModelForCausalLM

    where = (path.parent, path.name) if path.suffix == ".gguf" else (path, None)
    return AutoModelForCausalLM.from_pretrained(
        where[0], gguf_file=where[1], dtype=torch.float32
    ).eval()


@torch.inference_mode()
def greedy_answers(model: Any, prompts: list[list[int]], num_tokens: int) -> list[OracleAnswer]:
    """`num_tokens` greedy tokens after each prompt, end of text ignored.

    Prompts of any lengths run in one batch, padded on the left and masked.
    """
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = None
    tokens: list[list[int]] = [[] for _ in prompts]
    margins: list[list[float]] = [[] for _ in prompts]
    for _ in range(num_tokens):
        out = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = out.past_key_values
        best = out.logits[:, -1].topk(2)
        ids = out.logits[:, -1].argmax(1, keepdim=True)
        mask = torch.cat((mask, torch.ones_like(ids)), dim=1)
        positions = positions[:, -1:] + 1
        gaps = (best.values[:, 0] - best.values[:, 1]).tolist()
        for row, (token, gap) in enumerate(zip(ids[:, 0].tolist(), gaps, strict=True)):
            tokens[row].append(token)
            margins[row].append(gap)
    return [OracleAnswer(*pair) for pair in zip(tokens, margins, strict=True)]


def check_against(answer: OracleAnswer, token_ids: list[int], name: str) -> int:
    """Assert equality up to the first decision that rounding may turn; returns how many tokens
    were compared."""
    close = next(
        (index for index, gap in enumerate(answer.margins) if gap <= MARGIN), len(answer.margins)
    )
    assert len(token_ids) == len(answer.token_ids), name
    assert token_ids[:close] == answer.token_ids[:close], name
    return close
