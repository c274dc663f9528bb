"""The benchmark's two workloads: 64 chat prompts with and without one long shared system prompt.

Random common words, so that no answer is easier than another; 16 to 128 output tokens each. The
texts and lengths lie in `data/workload.json`. Each part of a prompt is tokenized by itself (a
border never merges), so the token ids are the same for every system that is handed them.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import orjson

DATA = Path(__file__).with_name("data") / "workload.json"
WorkloadName = Literal["shared", "unshared"]
WORKLOADS: tuple[WorkloadName, ...] = ("shared", "unshared")


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One prompt as token ids and how many tokens must come out (end of sequence is ignored)."""

    id: int
    prompt_token_ids: list[int]
    max_tokens: int


def build(
    name: WorkloadName, encode: Callable[[str], list[int]], count: int | None = None
) -> list[BenchRequest]:
    """The workload in the token ids of `encode` (text to ids, no special tokens added).

    `shared`: a 511-token head (with SmolLM2's tokenizer) before user texts of 32 to 256 tokens;
    `unshared`: the user texts alone. `count`: see `texts`.
    """
    encoded: dict[str, list[int]] = {}
    requests = []
    for index, (parts, max_tokens) in enumerate(_parts(name, count)):
        ids: list[int] = []
        for part in parts:
            if part not in encoded:
                encoded[part] = encode(part)
            ids += encoded[part]
        requests.append(BenchRequest(index, ids, max_tokens))
    return requests


def texts(name: WorkloadName, count: int | None = None) -> list[tuple[str, int]]:
    """The workload as text with its lengths, for a service that tokenizes by itself.

    `count` above 64 goes through the questions again under new numbers, so that no two prompts are
    equal.
    """
    return [("".join(parts), max_tokens) for parts, max_tokens in _parts(name, count)]


def synthesize(
    encode: Callable[[str], list[int]],
    *,
    requests: int,
    head_words: int,
    user_words: tuple[int, int],
    max_tokens: tuple[int, int],
    seed: int = 0,
) -> list[BenchRequest]:
    """More of the same kind at any size: words drawn from the shipped texts, uniform lengths."""
    data = orjson.loads(DATA.read_bytes())
    words = sorted(set(data["notes"].lower().replace(".", "").split()))
    draw = random.Random(seed)
    head: list[int] = []
    if head_words:
        head = encode("<|im_start|>system\n" + _text(draw, words, head_words) + "<|im_end|>\n")
    tail = encode("<|im_end|>\n<|im_start|>assistant\n")
    return [
        BenchRequest(
            index,
            head
            + encode(f"<|im_start|>user\nQuestion {index}: ")
            + encode(_text(draw, words, draw.randint(*user_words)))
            + tail,
            draw.randint(*max_tokens),
        )
        for index in range(requests)
    ]


def write(requests: list[BenchRequest], path: Path) -> None:
    """One JSON object a line, for systems that run in an environment of their own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(orjson.dumps(asdict(request)) + b"\n" for request in requests))


def _parts(name: WorkloadName, count: int | None = None) -> Iterator[tuple[list[str], int]]:
    """What is tokenized apart, in order, and the answer's length, for each request."""
    data = orjson.loads(DATA.read_bytes())
    head: list[str] = []
    if name == "shared":
        head = [f"<|im_start|>system\n{data['intro']}\n", data["notes"], "<|im_end|>\n"]
    tail = "<|im_end|>\n<|im_start|>assistant\n"
    users = data["users"]
    for index in range(len(users) if count is None else count):
        user = users[index % len(users)]
        question = f"<|im_start|>user\nQuestion {index}: "
        yield [*head, question, user["text"], tail], user["max_tokens"]


def _text(draw: random.Random, words: list[str], count: int) -> str:
    """`count` random words in sentences of 5 to 17."""
    sentences = []
    while count > 0:
        length = min(count, draw.randint(5, 17))
        sentences.append(" ".join(draw.choices(words, k=length)).capitalize() + ".")
        count -= length
    return " ".join(sentences)
