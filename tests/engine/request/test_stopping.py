"""Streamed text equals decoded text, for any tokenizer, and ends exactly where it should."""

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlaforge.checkpoint.source_model import load_tokenizer
from mlaforge.engine.request.detokenizer import WINDOW, Detokenizer
from mlaforge.engine.request.stop_strings import find_stop, partial_stop_length
from mlaforge.engine.request.stopping import Stopping
from mlaforge.engine.sampling.params import SamplingParams

PAD, BOS, EOS = 256, 257, 258
# Characters of one to four bytes, white space, and the character that stands for broken ones.
LETTERS = "ab .,\n\tÀé名字🙂👩\u200d🔬\ufffd▁"


@pytest.fixture(scope="module")
def tokenizer(tiny_models):
    return load_tokenizer(tiny_models["llama"])


def sentencepiece(decoder, pre_tokenizer=None):
    """Pieces with ▁ for a space, one token per byte for what is no piece, and special tokens."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁ab.,é名", "▁a", "▁b", "▁▁", "ab", "▁ab", "▁▁a"]
    merges = [("▁", "a"), ("▁", "b"), ("▁", "▁"), ("a", "b"), ("▁", "ab"), ("▁▁", "a")]
    vocab = {piece: n for n, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoder
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens(["<tool>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def stripping():
    """The decoder of most sentencepiece models: bytes joined, then one leading space stripped."""
    from tokenizers import decoders, pre_tokenizers

    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return sentencepiece(decoders.Sequence(steps), pre_tokenizers.Metaspace(prepend_scheme="first", split=False))


@pytest.fixture(scope="module")
def metaspace():
    """The Metaspace decoder: every ▁ of the first token is stripped, and byte tokens are plain text."""
    from tokenizers import decoders

    return sentencepiece(decoders.Metaspace())


@pytest.fixture(scope="module")
def real(smollm2):
    return load_tokenizer(smollm2)


def whole(tokenizer, ids, skip=True):
    return tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def check_stream(tokenizer, prompt, ids, skip):
    """Every text given out is the beginning of what follows the prompt when all is decoded at once."""
    before = whole(tokenizer, prompt, skip)
    expected = whole(tokenizer, prompt + ids, skip).removeprefix(before)
    stream, text = Detokenizer(tokenizer, skip, prompt), ""
    for token in ids:
        text += stream.append(token)
        assert expected.startswith(text), (expected, text)
    assert text + stream.flush() == expected
    return text


# --- detokenising


@settings(max_examples=300)
@given(st.lists(st.integers(0, 259), max_size=60), st.lists(st.integers(60, 90), max_size=9), st.booleans())
def test_detokenizes_any_bytes_special_and_unknown_tokens(tokenizer, ids, prompt, skip):
    """259 is an id beyond the tokenizer's, as padded vocabularies have them."""
    check_stream(tokenizer, prompt, ids, skip)


@settings(max_examples=100)
@given(st.lists(st.sampled_from([0x41, 0x80, 0xA0, 0xBD, 0xC3, 0xE4, 0xEF, 0xF0, 0xFF]), max_size=150))
@example([0xFF] * 200)
@example([0xE4, 0xBD] * 40 + [0xE4, 0xBD, 0xA0])
def test_detokenizes_long_runs_of_invalid_bytes(tokenizer, raw):
    """Nothing but the last few of them waits, and they are counted as decoding them at once counts them."""
    alphabet = tokenizer.backend_tokenizer.get_vocab()
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    ids = [alphabet[bytes_to_unicode()[byte]] for byte in raw]
    text = check_stream(tokenizer, [], ids, True)
    assert len(whole(tokenizer, ids)) - len(text) <= 2 * WINDOW


@settings(max_examples=200)
@given(st.lists(st.integers(257, 273), max_size=50), st.lists(st.integers(257, 269), max_size=9), st.booleans())
def test_leading_spaces_of_sentencepiece(stripping, metaspace, ids, prompt, skip):
    for tokenizer in (stripping, metaspace):
        assert tokenizer.convert_ids_to_tokens([257, 272]) == ["▁", "<tool>"]
        check_stream(tokenizer, prompt, ids, skip)


@settings(max_examples=200)
@given(st.text(LETTERS, max_size=60), st.text(LETTERS, max_size=10))
def test_detokenizes_byte_fallback(stripping, text, prompt):
    def ids(text):
        return stripping(text, add_special_tokens=False).input_ids

    check_stream(stripping, ids(prompt), ids(text), True)


def test_returned_text_stays_where_sentencepiece_retracts_it(stripping):
    """A complete character, then a byte that fits nothing: decoded at once, the character is lost."""
    character, broken, piece = [0xE5 + 1, 0x90 + 1, 0x8D + 1], 0xFF + 1, stripping.convert_tokens_to_ids("▁a")
    ids = [piece, *character, broken, piece]
    assert whole(stripping, ids) == "a\ufffd\ufffd\ufffd\ufffd a"
    stream = Detokenizer(stripping)
    assert "".join(map(stream.append, ids)) + stream.flush() == "a名\ufffd a"


@settings(max_examples=200)
@given(st.text(LETTERS, max_size=80), st.lists(st.integers(0, 49151), max_size=60), st.text(LETTERS, max_size=9))
def test_detokenizes_with_a_real_tokenizer(real, text, ids, prompt):
    check_stream(real, real(prompt).input_ids, real(text).input_ids, True)
    check_stream(real, real(prompt).input_ids, ids, False)
    check_stream(real, [], ids, True)


def test_incomplete_characters_are_not_returned(tokenizer):
    stream = Detokenizer(tokenizer)
    deltas = [stream.append(token) for token in tokenizer("a🙂b").input_ids]
    assert deltas == ["a", "", "", "", "🙂", "b"]


@pytest.mark.parametrize("text", ["a", "é", "\ufffd"])
def test_cost_per_token_is_constant(tokenizer, text):
    """Tokens decoded per token, with any length of the text behind."""
    ids = tokenizer(text * 1000).input_ids
    decoded = []

    class Counting:
        added_tokens_decoder = tokenizer.added_tokens_decoder
        convert_ids_to_tokens = tokenizer.convert_ids_to_tokens

        def decode(self, ids, **options):
            decoded.append(len(ids))
            return tokenizer.decode(ids, **options)

    stream = Detokenizer(Counting())
    assert "".join(map(stream.append, ids)) + stream.flush() == text * 1000
    assert max(decoded) <= 2 * WINDOW + 1
    assert sum(decoded) <= 2 * WINDOW * len(ids)


# --- stopping


def stopping(tokenizer, prompt=(), room=10_000, **params):
    return Stopping(tokenizer, SamplingParams(**{"max_tokens": None, **params}), list(prompt), [EOS], room)


def buffered(stop):
    """The text that would follow at the end."""
    return stop._buffered + stop._detokenizer.flush()


def run(tokenizer, ids, **params):
    """(text with the buffer, number of tokens, finish reason, stop reason), for tokens appended one at a time."""
    stop, text, count = stopping(tokenizer, **params), "", 0
    for token in ids:
        delta, num_tokens, *reasons = stop.append([token])
        text, count = text + delta, count + num_tokens
        if stop.finished:
            return text, count, *reasons
    return text + buffered(stop), count, None, None


def test_finish_reasons(tokenizer):
    ids = tokenizer("hello world").input_ids
    h, w = ids[0], ids[6]
    assert run(tokenizer, ids) == ("hello world", 11, None, None)
    assert run(tokenizer, [*ids, EOS, h]) == ("hello world", 12, "stop", None)
    assert run(tokenizer, [h, EOS, h], ignore_eos=True) == ("hh", 3, None, None)
    assert run(tokenizer, [h, EOS, h], ignore_eos=True, skip_special_tokens=False) == ("h</s>h", 3, None, None)
    assert run(tokenizer, ids, stop_token_ids=[w]) == ("hello ", 7, "stop", w)
    assert run(tokenizer, [h, EOS], stop_token_ids=[EOS], ignore_eos=True) == ("h", 2, "stop", EOS)
    # A grammar that has come to its end allows nothing else any more.
    for bound in ({"regex": "h"}, {"json_schema": {}}):
        assert run(tokenizer, [h, EOS], ignore_eos=True, **bound) == ("h", 2, "stop", None)
    assert run(tokenizer, ids, max_tokens=4) == ("hell", 4, "length", None)
    assert run(tokenizer, ids, prompt=ids, room=14) == ("hel", 3, "length", None)
    # What ends a text goes before what cuts it off.
    assert run(tokenizer, [h, EOS], max_tokens=2) == ("h", 2, "stop", None)
    assert run(tokenizer, ids, max_tokens=4, stop="ll") == ("he", 4, "stop", "ll")


def test_include_stop_str_shows_the_stop_token(tokenizer):
    ids = tokenizer("hello world").input_ids
    shown = {"include_stop_str_in_output": True}
    assert run(tokenizer, ids, stop_token_ids=[ids[6]], **shown)[0] == "hello w"
    assert run(tokenizer, [*ids, EOS], **shown)[0] == "hello world"
    assert run(tokenizer, [*ids, EOS], **shown, skip_special_tokens=False)[0] == "hello world</s>"
    assert run(tokenizer, ids, stop="o w", **shown) == ("hello w", 7, "stop", "o w")


def test_buffers_text_that_may_become_a_stop_string(tokenizer):
    one = stopping(tokenizer, stop=["END", "é!"])
    deltas = [one.append([token]).text for token in tokenizer("aENxEEN").input_ids]
    assert deltas == ["a", "", "", "ENx", "", "E", ""]
    assert one.append(tokenizer("é").input_ids) == ("EN", 2, None, None)
    assert one.append(tokenizer("?é").input_ids) == ("é?", 3, None, None)
    assert one.append(tokenizer("!x").input_ids) == ("", 1, "stop", "é!")
    assert one.finished
    with pytest.raises(AssertionError, match="has ended"):
        one.append([1])


def test_buffered_text_is_flushed_at_the_end(tokenizer):
    e = tokenizer("E").input_ids
    assert run(tokenizer, [*e, EOS], stop="END") == ("E", 2, "stop", None)
    assert run(tokenizer, e, stop="END", max_tokens=1) == ("E", 1, "length", None)
    assert run(tokenizer, tokenizer("é").input_ids, max_tokens=1) == ("\ufffd", 1, "length", None)


def test_min_tokens_ignores_stop_strings(tokenizer):
    ids = tokenizer("aaxaa").input_ids
    assert run(tokenizer, ids, stop="aa") == ("", 2, "stop", "aa")
    assert run(tokenizer, ids, stop="aa", min_tokens=2) == ("aax", 5, "stop", "aa")
    # One that began before but is complete after them counts.
    assert run(tokenizer, tokenizer("aaa").input_ids, stop="aa", min_tokens=2) == ("a", 3, "stop", "aa")


def test_first_complete_stop_string_wins(tokenizer):
    ids = tokenizer("abcdef").input_ids
    assert run(tokenizer, ids, stop=["bcde", "cd"]) == ("ab", 4, "stop", "cd")
    assert run(tokenizer, ids, stop=["d", "bcd", "cd"]) == ("a", 4, "stop", "bcd")
    assert find_stop("xaab", ["aab", "b"], 0) == (1, 4, "aab")
    assert find_stop("aaa", ["aa"], 2) == (1, 3, "aa") and find_stop("aa", ["aa"], 2) is None
    assert (
        partial_stop_length("xaba", ["abac", "a"]) == 3
        and partial_stop_length("xa", ["a"]) == 0
        and partial_stop_length("", ["ab"]) == 0
    )


def test_several_tokens_at_once_end_at_the_stop_token(tokenizer):
    ids = tokenizer("hello").input_ids
    assert stopping(tokenizer, stop="l").append(ids) == ("he", 3, "stop", "l")
    assert stopping(tokenizer).append([*ids, EOS, *ids]) == ("hello", 6, "stop", None)
    assert stopping(tokenizer, max_tokens=2).append(ids) == ("he", 2, "length", None)
    assert stopping(tokenizer).append([]) == ("", 0, None, None)


def reference(tokenizer, ids, stops, include, min_tokens, max_tokens):
    """The same by decoding everything again for every token."""
    passed = 0
    for count in range(1, len(ids) + 1):
        ended = ids[count - 1] == EOS
        text = whole(tokenizer, ids[: count - ended])
        if ended:
            return text, count, "stop", None
        certain = text if count == max_tokens else text.rstrip("\ufffd")
        if count <= min_tokens:
            passed = len(certain)
        else:
            places = [
                (start + len(stop), start, stop)
                for stop, start in itertools.product(stops, range(len(certain)))
                if certain.startswith(stop, start) and start + len(stop) > passed
            ]
            if places:
                end, start, stop = min(places)
                return certain[: end if include else start], count, "stop", stop
        if count == max_tokens:
            return text, count, "length", None
    return whole(tokenizer, ids), len(ids), None, None


@settings(max_examples=400)
@given(
    st.text("ab é名", max_size=20),
    st.lists(st.text("ab é名", min_size=1, max_size=4), max_size=4),
    st.booleans(),
    st.integers(0, 6),
    st.integers(6, 40),
    st.integers(0, 30),
    st.data(),
)
def test_stopping_equals_decoding_the_whole_text(tokenizer, text, stops, include, least, most, cut, data):
    ids = tokenizer(text).input_ids
    ids = [*ids[:cut], EOS, *ids[cut:]] if cut < len(ids) else ids
    params = {"stop": stops, "include_stop_str_in_output": include, "min_tokens": least, "max_tokens": most}
    expected = reference(tokenizer, ids, stops, include, least, most)
    assert run(tokenizer, ids, **params) == expected
    # Any number of tokens at a time gives the same.
    one, shown, kept, reasons = stopping(tokenizer, **params), "", 0, (None, None)
    while ids and not one.finished:
        width = data.draw(st.integers(1, 5))
        delta, took, *reasons = one.append(ids[:width])
        shown, kept, ids = shown + delta, kept + took, ids[width:]
        assert expected[0].startswith(shown)
    if not one.finished:
        shown += buffered(one)
    assert (shown, kept, *reasons) == expected
