"""Where a sequence ends and what its text is."""

import itertools

import pytest
from toy import EOS, ToyTokenizer

from headrace.engine.detokenizer import Detokenizer
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.sequence import FinishReason, Sequence
from headrace.engine.stopping import StopChecker, StopStrings


class Pieces:
    """A vocabulary in which token n is the n-th piece."""

    def __init__(self, *pieces):
        self.pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]

    def text_bytes(self, token_id):
        return self.pieces[token_id]


def checker(vocabulary, *, eos=(), special=None, limit=1000, **params):
    seq = Sequence("r", [0], SamplingParams(**params))
    seq.max_output_tokens = limit
    return StopChecker(seq, Detokenizer(vocabulary), eos, special or {})


def feed(stop, tokens):
    """Token by token; the texts seen on the way, and whether it ended."""
    texts = []
    for token in tokens:
        stop.seq.output_token_ids.append(token)
        ended = stop.check()
        texts.append(stop.seq.text)
        if ended:
            return texts, True
    return texts, False


def run_pieces(pieces, **params):
    stop = checker(Pieces(*pieces), **params)
    texts, ended = feed(stop, range(len(pieces)))
    if not ended:
        stop.close()
    return stop.seq, texts


def splits(text):
    """Every way to cut a text into pieces."""
    for cuts in itertools.product([False, True], repeat=len(text) - 1):
        pieces, start = [], 0
        for end, cut in enumerate(cuts, 1):
            if cut:
                pieces.append(text[start:end])
                start = end
        yield [*pieces, text[start:]]


@pytest.mark.parametrize(
    ("text", "stops", "kept", "reason"),
    [
        ("abSTOPc", ("STOP",), "ab", "STOP"),
        ("abSTOP", ("STOP",), "ab", "STOP"),
        ("STSTOPx", ("STOP",), "ST", "STOP"),
        ("aabaabaac", ("aabaac",), "aab", "aabaac"),
        ("xabcd", ("abcd", "bc"), "xa", "bc"),
        ("xabcy", ("abc", "bc"), "x", "abc"),
        ("a\n\nb", ("\n\n",), "a", "\n\n"),
        ("no stop", ("STOP",), "no stop", None),
        ("endsSTO", ("STOP",), "endsSTO", None),
    ],
)
def test_a_stop_string_is_found_at_every_split_into_tokens(text, stops, kept, reason):
    """vllm PR#3672: stop strings that span tokens, or end in the middle of one. The answer must not
    depend on how the tokenizer cut the text."""
    for pieces in splits(text):
        seq, _ = run_pieces(pieces, stop=stops)
        assert (seq.text, seq.stop_reason) == (kept, reason), pieces


def test_text_that_may_begin_a_stop_string_is_held_back():
    """vllm#3574: prompt "Here is the English alphabet: ABC", stop "DEFGHIJ"."""
    seq, texts = run_pieces(list("ABCDEFGHIJK"), stop=("DEFGHIJ",))
    assert texts[-1] == "ABC" == seq.text
    assert not any("D" in text for text in texts)
    seq, texts = run_pieces(list("ABCDEFX"), stop=("DEFGHIJ",))
    assert texts[5] == "ABC" and texts[6] == "ABCDEFX"


def test_texts_on_the_way_only_grow():
    for pieces in splits("aSTSTOaSTOPb"[:10]):
        _, texts = run_pieces(pieces, stop=("STOP", "Ob"))
        assert all(b.startswith(a) for a, b in itertools.pairwise(texts))


def test_held_back_text_is_part_of_the_answer_if_it_ends_otherwise():
    seq, _ = run_pieces(["a", "ST", "O"], stop=("STOP",), limit=3)
    assert (seq.text, seq.finish_reason) == ("aSTO", FinishReason.LENGTH)
    stop = checker(Pieces("a", "ST", "</s>"), eos=(2,), stop=("STOP",))
    feed(stop, [0, 1, 2])
    assert (stop.seq.text, stop.seq.finish_reason) == ("aST", FinishReason.STOP)


def test_eos_ends_before_its_own_text_and_every_id_of_several_does():
    """vllm#4180: an EOS list [1, 106]; each must end it."""
    for end in (1, 2):
        stop = checker(Pieces("a", "</s>", "<eot>"), eos=(1, 2))
        assert feed(stop, [0, 0, end]) == (["a", "aa", "aa"], True)
        assert stop.seq.finish_reason is FinishReason.STOP
        assert stop.seq.stop_reason is None


def test_ignore_eos_goes_on_after_eos_but_not_after_a_stop_token():
    stop = checker(Pieces("a", "E", "b"), eos=(1,), ignore_eos=True, stop_token_ids=(2,))
    texts, ended = feed(stop, [0, 1, 0, 2])
    assert ended and texts[-1] == "aEa"
    assert stop.seq.stop_reason == 2


def test_a_stop_string_that_names_a_special_token_stops_at_that_token():
    """Special tokens have no text, so the string could never be found in it."""
    stop = checker(ToyTokenizer(), special={258: "<end>"}, stop=("<end>",))
    texts, ended = feed(stop, [104, 105, 258])
    assert ended and texts[-1] == "hi" and stop.seq.stop_reason == "<end>"


def test_min_tokens_delays_every_end_but_the_limit():
    stop = checker(ToyTokenizer(), eos=(EOS,), min_tokens=3, stop=("b",), stop_token_ids=(99,))
    texts, ended = feed(stop, [98, EOS, 97, 98])
    assert ended and texts[-1] == "ba" and stop.seq.stop_reason == "b"


def test_a_stop_string_wholly_before_min_tokens_is_text_and_one_across_is_not():
    seq, _ = run_pieces(["xx", "ST", "OP", "y"], stop=("STOP",), min_tokens=3)
    assert (seq.text, seq.stop_reason) == ("xx", "STOP")
    seq, _ = run_pieces(["STOP", "a", "b"], stop=("STOP", "STOPab!"), min_tokens=2)
    assert (seq.text, seq.stop_reason) == ("STOPab", None)


@pytest.mark.parametrize("limit", [1, 2])
def test_the_limit_ends_exactly_there(limit):
    stop = checker(Pieces("a"), limit=limit)
    texts, ended = feed(stop, [0, 0, 0])
    assert ended and len(texts) == limit
    assert stop.seq.finish_reason is FinishReason.LENGTH


def test_tokens_after_the_end_are_dropped():
    """A step may yield several tokens; what follows the end was never asked for."""
    stop = checker(ToyTokenizer(), eos=(EOS,))
    stop.seq.output_token_ids.extend([97, EOS, 98, 99])
    assert stop.check()
    assert stop.seq.output_token_ids == [97, EOS]
    assert stop.seq.text == "a"


def test_a_stop_string_in_multi_byte_text_is_found():
    pieces = ["世".encode()[:2], "世".encode()[2:] + "界".encode()[:1], "界".encode()[1:] + b"!"]
    seq, texts = run_pieces(pieces, stop=("界",))
    assert texts == ["", "世", "世"] and seq.stop_reason == "界"


def test_stop_strings_without_any_hold_nothing_back():
    strings = StopStrings(())
    assert strings.push("abc") is None
    assert strings.text == "abc"
