"""Builds a tokenizer from a GGUF file's metadata, which has no tokenizer.json.

Two kinds: `gpt2` (byte-level BPE with merges, split beforehand by a pattern that only a name tells)
and `llama` (SentencePiece BPE: merges follow from the pieces' scores). Any other kind or pattern
name is refused by name, since a wrong split gives wrong tokens without any error.
Sources: the pattern names and patterns of llama.cpp's `llama-vocab.cpp`.
"""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from headrace.engine.errors import CheckpointError
from headrace.engine.token_bytes import BYTE_OF_CHAR, CHAR_OF_BYTE

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_PATTERNS: dict[str, str] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "tekken": _TEKKEN,
}
_PLAIN = ("gpt-2", "default", "")
_DIGIT_BY_DIGIT = ("smollm", "starcoder", "refact", "command-r", "codeshell")
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken")
"""A word that is a token is taken as it is, even where the merges would not lead to it."""

_BEGINS_WITH_BOS = ("llama-bpe", "llama3", "llama-v3", "tekken")
"""What llama.cpp assumes of these when the file has no `add_bos_token`."""

TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>")
"""Control tokens that end an answer even where the file names only another id as EOS."""


def build_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer that the metadata describes, without adding BOS or EOS."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise CheckpointError("the GGUF file has no tokenizer (tokenizer.ggml.tokens is missing)")
    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(f"{len(tokens)} tokens, but {len(types)} token types")
    if kind == "gpt2":
        tokenizer = _byte_level(metadata, tokens, types)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata, tokens)
    else:
        raise CheckpointError(f"tokenizer.ggml.model {kind!r} is not supported (gpt2, llama are)")
    named = {
        metadata.get(f"tokenizer.ggml.{name}_token_id")
        for name in ("bos", "eos", "unknown", "padding")
    }
    control = [
        AddedToken(token, normalized=False, special=True)
        for index, (token, type_) in enumerate(zip(tokens, types, strict=True))
        if type_ in (CONTROL, UNKNOWN) or index in named
    ]
    tokenizer.add_special_tokens(control)
    user = [
        AddedToken(token, normalized=False, special=False)
        for token, type_ in zip(tokens, types, strict=True)
        if type_ == USER_DEFINED
    ]
    tokenizer.add_tokens(user)
    if tokenizer.get_vocab_size() > len(tokens):
        raise CheckpointError("the GGUF file's tokenizer lists a special token twice")
    return tokenizer


def adds_bos(metadata: dict[str, Any]) -> bool:
    """Whether a prompt begins with BOS: as the file says, else as its kind has it."""
    declared = metadata.get("tokenizer.ggml.add_bos_token")
    if declared is not None:
        return bool(declared)
    if metadata.get("tokenizer.ggml.model") == "llama":
        return True
    return metadata.get("tokenizer.ggml.pre") in _BEGINS_WITH_BOS


def eos_token_ids(metadata: dict[str, Any]) -> tuple[int, ...]:
    """Every id that ends an answer: declared ones, and control tokens that end a turn."""
    ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    types = metadata.get("tokenizer.ggml.token_type") or []
    ids += [
        index
        for index, (token, type_) in enumerate(zip(tokens, types, strict=False))
        if type_ == CONTROL and token in TURN_ENDS
    ]
    return tuple(dict.fromkeys(index for index in ids if isinstance(index, int)))


def _byte_level(metadata: dict[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    name = metadata.get("tokenizer.ggml.pre") or ""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in _PATTERNS:
        split = pre_tokenizers.Split(Regex(_PATTERNS[name]), behavior="isolated")
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        pre_tokenizer: Any = pre_tokenizers.Sequence([split, bytes_only])
    elif name in _DIGIT_BY_DIGIT:
        digits = pre_tokenizers.Digits(individual_digits=True)
        pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    elif name in _PLAIN:
        pre_tokenizer = byte_level
    else:
        known = ", ".join(sorted((*_PATTERNS, *_DIGIT_BY_DIGIT, *_PLAIN[:-1])))
        raise CheckpointError(f"tokenizer.ggml.pre {name!r} is not supported ({known} are)")
    vocabulary = {
        _spelled(token) if type_ == NORMAL else token: index
        for index, (token, type_) in enumerate(zip(tokens, types, strict=True))
    }
    merges = _merge_pairs(metadata.get("tokenizer.ggml.merges") or [], vocabulary)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=name in _WHOLE_WORDS)
    )
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _spelled(token: str) -> str:
    """In the byte alphabet; files are found that spell some tokens in plain UTF-8."""
    if all(char in BYTE_OF_CHAR for char in token):
        return token
    return "".join(CHAR_OF_BYTE[byte] for byte in token.encode())


def _merge_pairs(merges: list[str], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise CheckpointError(f"the tokenizer's merge {merge!r} names a token it doesn't have")
        pairs.append((left, right))
    return pairs


def _sentencepiece(metadata: dict[str, Any], tokens: list[str]) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = metadata.get("tokenizer.ggml.merges")
    if merges:
        pairs = _merge_pairs(merges, vocabulary)
    else:
        scores = metadata.get("tokenizer.ggml.scores")
        if not scores or len(scores) != len(tokens):
            raise CheckpointError("the GGUF file's tokenizer has neither merges nor scores")
        pairs = _merges_of(vocabulary, scores)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=pairs, fuse_unk=True, byte_fallback=True)
    )
    with_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme="first" if with_space else "never", split=False
    )
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if with_space:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_of(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose result has the best score: as a list of merges, every
    way to cut every piece in two pieces, best result first."""
    cuts: list[tuple[float, int, int, str, str]] = []
    for token, index in vocabulary.items():
        found = [
            (token[:cut], token[cut:])
            for cut in range(1, len(token))
            if token[:cut] in vocabulary and token[cut:] in vocabulary
        ]
        found.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        cuts.extend((scores[index], len(left), len(right), left, right) for left, right in found)
    cuts.sort(key=lambda cut: cut[:3], reverse=True)
    return [(left, right) for *_, left, right in cuts]
