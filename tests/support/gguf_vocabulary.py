"""Writes GGUF files that hold a small trained vocabulary and nothing else of use."""

import json
from pathlib import Path

import gguf
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXTS = [
    "Hello world, it's a naïve café — “quotes” and 1234567 numbers, 3.14, x² ½.",
    "The quick brown fox jumps over the lazy dog; don't, we'll, THEY'RE, I'VE.",
    "日本語テキスト 中文 한국어 ภาษาไทย עברית العربية हिन्दी Ελληνικά Русский",
    "def f(x):\n    return x**2\t# tab\r\n\n\n  if x == 10:   pass",
    "emoji 😀 👨‍👩‍👧‍👦 🇩🇪 e\u0301 combining \u200b zero width",
    " leading space,  two  spaces,   three   spaces, trailing ",
    "https://example.com/path?a=1&b=2#frag user@example.com /usr/lib/x.so.6",
    "",
    " ",
    "\n",
    "   \n\n \t x",
    "CamelCaseWords and snake_case_words and kebab-case-words",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U0010ffff \x00\x01\x7f",
]
"""What tokenizers are compared on: scripts, digits, spaces, lines, cases, rare characters."""

CONTROL = ("<s>", "</s>", "<|im_end|>")


def byte_level_tokens() -> tuple[list[str], list[int], list[str]]:
    """Tokens, types and merges of a byte-level BPE trained on the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(CONTROL),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = [" ".join(pair) for pair in _merges(tokenizer)]
    types = [3 if token in CONTROL else 1 for token in tokens]
    return tokens, types, merges


def sentencepiece_tokens() -> tuple[list[str], list[int], list[float]]:
    """Tokens, types and scores in the manner of a SentencePiece BPE with byte fallback."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False)
    tokenizer.train_from_iterator(TEXTS[:2] * 3, trainer)
    merged = ["".join(pair) for pair in _merges(tokenizer)]
    letters = sorted(set(tokenizer.get_vocab()) - set(merged))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3] + [6] * 256
    scores = [0.0] * len(tokens)
    unique = list(dict.fromkeys(merged))
    for rank, piece in enumerate([*unique, *letters]):
        tokens.append(piece)
        types.append(1)
        scores.append(-float(rank))
    return tokens, types, scores


def _merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    return [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


def write_gguf(
    path: Path,
    kind: str = "gpt2",
    pre: str | None = "gpt-2",
    bos: int | None = 0,
    eos: int | None = 1,
    add_bos: bool | None = None,
    add_space_prefix: bool | None = None,
    chat_template: str | None = None,
) -> Path:
    """A GGUF file of the llama architecture with a vocabulary and one small tensor."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(kind)
    if kind == "gpt2":
        tokens, types, merges = byte_level_tokens()
        writer.add_token_merges(merges)
    else:
        tokens, types, scores = sentencepiece_tokens()
        writer.add_token_scores(scores)
    writer.add_vocab_size(len(tokens))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    if bos is not None:
        writer.add_bos_token_id(bos)
    if eos is not None:
        writer.add_eos_token_id(eos)
    if kind == "llama":
        writer.add_unk_token_id(0)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    if add_space_prefix is not None:
        writer.add_add_space_prefix(add_space_prefix)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 8), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
