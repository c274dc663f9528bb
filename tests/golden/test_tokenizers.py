"""Token ids against Transformers, which reads the same GGUF files and folders by itself."""

import json
from pathlib import Path

import pytest
import tiny
from gguf_vocabulary import TEXTS, write_gguf
from transformers import AutoTokenizer

from headrace.engine.loading.source import resolve_model
from headrace.engine.tokenizer import load_tokenizer

CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "naïve café 日本語 😀?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "And  two\n\nlines?"},
    ],
]


def both(folder: Path, file: str | None = None):
    ours = load_tokenizer(folder / file if file else folder)
    extra = {"gguf_file": file} if file else {}
    return ours, AutoTokenizer.from_pretrained(str(folder), **extra)


def check_equal(ours, theirs, texts=TEXTS):
    for text in texts:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, text
        bare = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == bare
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


@pytest.mark.parametrize("pre", ["gpt-2", "default", "llama-bpe", "qwen2", "tekken"])
@pytest.mark.parametrize("add_bos", [True, False])
def test_byte_level_gguf_vocabularies_of_every_split_pattern(tmp_path, pre, add_bos):
    write_gguf(tmp_path / "m.gguf", "gpt2", pre, add_bos=add_bos)
    check_equal(*both(tmp_path, "m.gguf"))


@pytest.mark.parametrize("add_bos", [None, True, False])
def test_sentencepiece_gguf_vocabularies(tmp_path, add_bos):
    """No flag: such a vocabulary begins with BOS. Merges follow from scores."""
    write_gguf(tmp_path / "m.gguf", "llama", "default", bos=1, eos=2, add_bos=add_bos)
    check_equal(*both(tmp_path, "m.gguf"))


def test_special_tokens_in_the_text_are_single_ids(tmp_path):
    write_gguf(tmp_path / "m.gguf", "gpt2", "llama-bpe", add_bos=False)
    check_equal(*both(tmp_path, "m.gguf"), ["a<|im_end|>b", "<|im_end|>", "x <|im_end|> </s>y"])


@pytest.mark.model
def test_the_demo_model_reads_text_and_chats_as_transformers_does():
    """Transformers does not know this vocabulary's `smollm` split (see the next test), so no text
    here has several spaces, or a numeric character that is no digit, before digits."""
    path = resolve_model("smollm2-135m-instruct")
    ours, theirs = both(path.parent, path.name)
    texts = [text for text in TEXTS if "½" not in text and "  if x" not in text]
    check_equal(ours, theirs, [*texts, "In 1999, 3.14 and 42 things cost $5,000 (50%)."])
    for chat in CHATS:
        expected = theirs.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        assert ours.apply_chat_template(chat) == expected
    assert ours.vocab_size == len(theirs) == 49152
    for token in range(0, ours.vocab_size, 11):
        assert ours.decode([token]) == theirs.decode([token], skip_special_tokens=True)


@pytest.mark.model
def test_the_demo_model_splits_every_digit_off_as_it_was_trained():
    """`tokenizer.ggml.pre` is smollm: digits are cut off one by one before anything else, so the
    spaces before them stay together. The vocabulary has no token of a space and a digit."""
    tokenizer = load_tokenizer(resolve_model("smollm2-135m-instruct"))
    spelled = [tokenizer.token_text(token) for token in tokenizer.encode("a  12")]
    assert spelled == ["a", "  ", "1", "2"]


def test_folders_of_tiny_models(tmp_path):
    tiny.write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    ours, theirs = both(tmp_path)
    check_equal(ours, theirs)
    for chat in CHATS:
        expected = theirs.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        assert ours.apply_chat_template(chat) == expected
