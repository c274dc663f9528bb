"""Text piece by piece equals the text of the whole, in every script and at every cut."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import ToyTokenizer

from headrace.engine.detokenizer import Detokenizer


def stream(ids):
    decoder = Detokenizer(ToyTokenizer())
    parts = [decoder.push(token) for token in ids]
    return [*parts, decoder.finish()]


@pytest.mark.parametrize(
    "text",
    ["plain", "naïve", "한글", "ภาษาไทย", "世界", "👨‍👩‍👧‍👦 family", "🇩🇪", "e\u0301", "\U0010ffff"],
)
def test_multi_byte_text_comes_out_whole_and_never_broken(text):
    """dynamo#12630, exo PR#1691: U+FFFD for Hangul. One byte a token is the worst case."""
    parts = stream(text.encode())
    assert "".join(parts) == text
    assert "\ufffd" not in "".join(parts)


def test_an_unfinished_character_is_held_back_and_nothing_is_said_twice():
    """sglang#31598: deltas of "A 世ab" gave "A 世世ab"."""
    parts = stream("A 世ab".encode())
    assert parts == ["A", " ", "", "", "世", "a", "b", ""]


def test_a_character_that_never_ends_is_one_replacement():
    assert "".join(stream("世".encode()[:2])) == "\ufffd"
    assert "".join(stream("世".encode()[:2] + b"a")) == "\ufffda"


def test_special_tokens_have_no_text():
    assert "".join(stream([256, 104, 257, 105, 258])) == "hi"


def test_a_special_token_inside_a_character_breaks_nothing():
    data = list("世".encode())
    assert "".join(stream([*data[:2], 257, *data[2:]])) == "世"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 259), max_size=40))
def test_the_pieces_of_any_tokens_make_the_text_of_the_whole(ids):
    parts = stream(ids)
    assert "".join(parts) == ToyTokenizer().decode(ids)
    for before, after in itertools.pairwise(itertools.accumulate(parts)):
        assert after.startswith(before)
