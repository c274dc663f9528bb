"""Tokenizers from files: BOS, EOS, bytes of tokens, and files that are refused."""

import json
from pathlib import Path

import pytest
from gguf_vocabulary import TEXTS, write_gguf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from headrace.engine.detokenizer import Detokenizer
from headrace.engine.errors import CheckpointError, RequestError
from headrace.engine.tokenizer import load_tokenizer

CHAT = [{"role": "user", "content": "hi"}]
WITH_BOS = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
WITHOUT_BOS = "{% for m in messages %}{{ m.content }}{% endfor %}"


def write_folder(
    folder: Path,
    template: str | None = WITH_BOS,
    processor_adds_bos: bool = True,
    config: dict | None = None,
    generation: dict | None = None,
    model: dict | None = None,
) -> Path:
    """Byte-level, with <s> 256, </s> 257, <eot> 258 and a visible added token <think> 259."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True) for name in ("<s>", "</s>", "<eot>")]
    )
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    if processor_adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 256)]
        )
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, **(config or {})}
    if template is not None:
        settings["chat_template"] = template
    for name, value in (
        ("tokenizer_config.json", settings),
        ("generation_config.json", generation or {}),
        ("config.json", model or {}),
    ):
        (folder / name).write_text(json.dumps(value))
    return folder


# --- BOS --------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [WITH_BOS, WITHOUT_BOS, "{{ bos_token }}" + WITH_BOS])
@pytest.mark.parametrize("processor", [True, False])
@pytest.mark.parametrize("flag", [None, True, False])
def test_exactly_one_bos_on_both_paths(tmp_path, template, processor, flag):
    """vllm#27486, #16976, #55197; sglang PR#888: two BOS, or none, or other ids for text than for
    chat. Whoever writes it (template, tokenizer, the text itself), there is one."""
    config = {} if flag is None else {"add_bos_token": flag}
    tokenizer = load_tokenizer(write_folder(tmp_path / "m", template, processor, config))
    wanted = processor if flag is None else flag
    assert tokenizer.adds_bos == wanted
    for text in ("hi", "<s>hi"):
        ids = tokenizer.encode(text)
        assert ids.count(256) == (1 if wanted or text.startswith("<s>") else 0)
    assert tokenizer.encode("hi", add_special_tokens=False).count(256) == 0
    if wanted:
        chat = tokenizer.apply_chat_template(CHAT)
        assert chat == tokenizer.encode("hi")
        assert chat == tokenizer.encode(tokenizer.render_chat(CHAT))
        assert chat.count(256) == 1


@pytest.mark.parametrize(
    ("kind", "pre", "flag", "wanted"),
    [
        ("gpt2", "gpt-2", None, False),
        ("gpt2", "llama-bpe", None, True),
        ("gpt2", "llama-bpe", False, False),
        ("gpt2", "smollm", True, True),
        ("llama", "default", None, True),
        ("llama", "default", False, False),
    ],
)
def test_a_gguf_file_says_whether_it_wants_bos_or_its_kind_does(tmp_path, kind, pre, flag, wanted):
    path = write_gguf(tmp_path / "m.gguf", kind, pre, bos=1, eos=2, add_bos=flag)
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("x").count(1) == int(wanted)


# --- EOS --------------------------------------------------------------------------------------


def test_eos_ids_of_all_files_are_one_set(tmp_path):
    """vllm#4180, mlx-vlm PR#2112: a list in generation_config, another in config, the tokenizer's
    own: each of them ends an answer."""
    folder = write_folder(
        tmp_path / "m", generation={"eos_token_id": [1, 106]}, model={"eos_token_id": 258}
    )
    assert load_tokenizer(folder).eos_token_ids == (1, 106, 258, 257)


def test_a_gguf_files_turn_end_is_an_eos_beside_the_declared_one(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "gpt2", "gpt-2", eos=1)
    assert load_tokenizer(path).eos_token_ids == (1, 2)


# --- text and bytes ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["folder", "gpt2", "llama"])
def test_the_stream_equals_the_whole_for_every_text_and_vocabulary(tmp_path, kind):
    """Byte-level BPE and byte fallback; every token by itself, and all at once."""
    if kind == "folder":
        tokenizer = load_tokenizer(write_folder(tmp_path / "m"))
    else:
        path = write_gguf(tmp_path / "m.gguf", kind, bos=1, eos=2, add_space_prefix=False)
        tokenizer = load_tokenizer(path)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        decoder = Detokenizer(tokenizer)
        parts = [decoder.push(token) for token in ids]
        assert "".join([*parts, decoder.finish()]) == text == tokenizer.decode(ids)
        assert not any("\ufffd" in part for part in parts)


def test_an_answer_keeps_the_space_that_a_whole_text_loses(tmp_path):
    """SentencePiece drops the first space of a text; an answer goes on after its prompt."""
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", "llama", bos=1, eos=2))
    ids = tokenizer.encode("fox jumps", add_special_tokens=False)
    assert tokenizer.decode(ids) == "fox jumps"
    decoder = Detokenizer(tokenizer)
    assert "".join(map(decoder.push, ids)) == " fox jumps"


def test_special_tokens_have_no_text_but_added_ones_do(tmp_path):
    tokenizer = load_tokenizer(write_folder(tmp_path / "m"))
    ids = tokenizer.encode("<think>a<eot>")
    assert ids[1:] == [259, ids[2], 258]
    assert tokenizer.decode(ids) == "<think>a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s><think>a<eot>"
    assert tokenizer.token_text(258) == "<eot>" and tokenizer.text_bytes(258) == b""
    assert tokenizer.special_token_ids == {"<s>": 256, "</s>": 257, "<eot>": 258}


def test_tokens_of_half_characters_have_bytes_and_a_replacement_as_text(tmp_path):
    tokenizer = load_tokenizer(write_folder(tmp_path / "m"))
    ids = tokenizer.encode("世", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == "世".encode()
    assert {tokenizer.token_text(token) for token in ids} == {"\ufffd"}


def test_an_id_beyond_the_vocabulary_has_no_text(tmp_path):
    """Padding rows of an embedding; they can't be sampled, but a logprob may name one."""
    tokenizer = load_tokenizer(write_folder(tmp_path / "m"))
    assert tokenizer.vocab_size == 260
    assert tokenizer.token_bytes(10_000) == b"" and tokenizer.token_text(10_000) == ""


def test_truncation_and_padding_saved_in_a_file_do_not_touch_prompts(tmp_path):
    tokenizer = load_tokenizer(write_folder(tmp_path / "m"))
    assert len(tokenizer.encode("x" * 50)) == 51
    assert len(tokenizer.encode("x")) == 2


# --- templates --------------------------------------------------------------------------------


def test_a_template_file_goes_before_the_one_in_the_configuration(tmp_path):
    folder = write_folder(tmp_path / "m", WITH_BOS)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert load_tokenizer(folder).render_chat(CHAT) == "hi!"


def test_of_named_templates_the_default_one_counts(tmp_path):
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    tokenizer = load_tokenizer(write_folder(tmp_path / "m", None, config={"chat_template": named}))
    assert tokenizer.render_chat(CHAT) == "yes"


def test_a_gguf_files_template_is_used(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", chat_template="{{ bos_token }}{{ messages[0].content }}")
    tokenizer = load_tokenizer(path)
    assert tokenizer.render_chat(CHAT) == "<s>hi"
    assert tokenizer.apply_chat_template(CHAT).count(0) == 1


def test_messages_without_a_template_are_a_typed_error(tmp_path):
    tokenizer = load_tokenizer(write_folder(tmp_path / "m", None))
    with pytest.raises(RequestError) as caught:
        tokenizer.apply_chat_template(CHAT)
    assert caught.value.code == "template_error" and not tokenizer.has_chat_template


# --- what is refused --------------------------------------------------------------------------


def test_an_unknown_split_pattern_is_refused_by_name(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "gpt2", "brand-new-pre")
    with pytest.raises(CheckpointError, match="brand-new-pre"):
        load_tokenizer(path)


def test_an_unknown_decoder_is_refused_by_name(tmp_path):
    folder = write_folder(tmp_path / "m")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="WordPiece"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", "{"),
        ("tokenizer.json", '{"model": {}}'),
        ("tokenizer_config.json", "[]"),
        ("generation_config.json", "not json"),
    ],
)
def test_a_missing_or_broken_file_is_named(tmp_path, file, content):
    folder = write_folder(tmp_path / "m")
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(content)
    with pytest.raises(CheckpointError, match=file):
        load_tokenizer(folder)


def test_a_vocabulary_whose_merges_do_not_fit_is_refused(tmp_path, monkeypatch):
    import gguf_vocabulary

    tokens, types, merges = gguf_vocabulary.byte_level_tokens()
    monkeypatch.setattr(
        gguf_vocabulary, "byte_level_tokens", lambda: (tokens, types, ["qq zz", *merges])
    )
    path = write_gguf(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match="qq zz"):
        load_tokenizer(path)
