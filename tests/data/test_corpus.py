"""Corpus windows: order and completeness, sources, the embedded split, and detection of overlap."""

import json
from collections import Counter
from pydoc_data.topics import topics

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from mlaforge.checkpoint.source_model import load_tokenizer
from mlaforge.data import corpus, overlap, records
from mlaforge.data.corpus import EMBEDDED, Windows
from mlaforge.data.overlap import DISTINCT, LONG, SHINGLE
from mlaforge.runtime import UserError


@pytest.fixture(scope="session")
def letters(tiny_models):
    """A tokenizer with one token per byte."""
    return load_tokenizer(tiny_models["llama"])


def byte_pairs(texts, size):
    """Train a byte-level BPE of `size` tokens that adds <s> and </s> to every text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=size, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    )
    bpe.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def words():
    return byte_pairs(list(topics.values())[:10], 600)


@pytest.fixture(scope="module")
def long_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("long") / "long.txt"
    path.write_text("\n\n".join(sorted(topics.values())[:40]), encoding="utf-8")
    return path


# Windows


@given(text=st.text(min_size=1, max_size=400), count=st.integers(1, 9), seqlen=st.integers(1, 90))
@example(text="ab" * 50, count=2, seqlen=50)
def test_windows_are_the_text_from_its_start(letters, tmp_path_factory, text, count, seqlen):
    text = text.replace("\r", "")  # line ends are normalised
    assume(text.strip())
    path = tmp_path_factory.mktemp("any") / "a.txt"
    path.write_text(text, encoding="utf-8")
    whole = letters(text)["input_ids"]
    n = min(count, len(whole) // seqlen)
    if n:
        got = corpus.windows(letters, str(path), count, seqlen)
        assert got.ids.shape == (n, seqlen)
        assert got.ids.flatten().tolist() == whole[: n * seqlen]
    else:
        with pytest.raises(UserError, match=f"fewer than {seqlen} tokens"):
            corpus.windows(letters, str(path), count, seqlen)


def test_no_special_tokens_are_added(words, long_file):
    assert words("word")["input_ids"][0] == words.bos_token_id
    ids = corpus.windows(words, str(long_file), 10**6, 64).ids
    assert not torch.isin(ids, torch.tensor(words.all_special_ids)).any()
    assert long_file.read_text().startswith(words.decode(ids.flatten()))
    assert ids.numel() > 50_000


@pytest.mark.parametrize(("count", "seqlen"), [(1, 48), (3, 48), (20, 48), (2, 2048), (16, 2048)])
def test_tokenizing_only_the_beginning_gives_the_same_windows(count, seqlen, words, long_file):
    everything = corpus.windows(words, str(long_file), 10**6, seqlen).ids
    assert len(everything) > count
    assert torch.equal(corpus.windows(words, str(long_file), count, seqlen).ids, everything[:count])


def test_no_tokens_of_a_long_text(words):
    assert corpus.tokens(words, "a few words " * 9999, 0).shape == (0,)


def test_a_word_at_the_cut_is_tokenized_whole(tmp_path):
    """One token for eight characters, more for the first word: reading stops within the last requested word."""
    beginning = "abcdefghijkl" + " abcdefg" * 255
    (tmp_path / "a.txt").write_text(beginning + " abcdefg" * 5000)
    tokenizer = byte_pairs([beginning], 300)
    expected = tokenizer(beginning, add_special_tokens=False)["input_ids"]
    assert len(expected) == 256
    assert corpus.windows(tokenizer, str(tmp_path / "a.txt"), 4, 64).ids.flatten().tolist() == expected


def test_a_seed_chooses_windows_in_order(words, long_file):
    everything = [tuple(row.tolist()) for row in corpus.windows(words, str(long_file), 10**6, 64).ids]
    position = {row: index for index, row in enumerate(everything)}
    chosen = {}
    for seed in (0, 1):
        rows = corpus.windows(words, str(long_file), 20, 64, seed=seed).ids
        chosen[seed] = [position[tuple(row.tolist())] for row in rows]
        assert chosen[seed] == sorted(set(chosen[seed]))
        assert torch.equal(rows, corpus.windows(words, str(long_file), 20, 64, seed=seed).ids)
        # From the whole text, not from its start.
        assert max(chosen[seed]) > len(everything) / 2
    assert chosen[0] != chosen[1]


def test_the_hash_depends_on_the_tokens_alone(letters, tmp_path):
    for name, text in (("a", "Some text. " * 20), ("b", "Some text. " * 20), ("c", "Some text! " * 20)):
        (tmp_path / f"{name}.txt").write_text(text)
    a, b, c = (corpus.windows(letters, str(tmp_path / f"{name}.txt"), 2, 64) for name in "abc")
    assert a.sha256 == b.sha256 != c.sha256
    assert a.describe() == {"source": "a.txt", "sha256": a.sha256, "windows": 2, "seqlen": 64, "tokens": 128}


# Sources


def test_reads_files_folders_and_json_lines(tmp_path):
    (tmp_path / "a.txt").write_text("Grüße")
    assert corpus.read_text(str(tmp_path / "a.txt")) == "Grüße"
    (tmp_path / "b.jsonl").write_text(
        json.dumps({"id": 1, "text": "one\nline"}) + "\n\n" + '{"text": "a\u2028b\x85c"}\n', encoding="utf-8"
    )
    assert corpus.read_text(str(tmp_path / "b.jsonl")) == "one\nline\n\na\u2028b\x85c"
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "c.md").write_text("Deep")
    (tmp_path / "d.bin").write_bytes(b"\xff")
    (tmp_path / "folder.txt").mkdir()
    assert corpus.read_text(str(tmp_path)) == "Grüße\n\none\nline\n\na\u2028b\x85c\n\nDeep"


class Template:
    """A tokenizer with a chat template."""

    chat_template = "yes"

    def apply_chat_template(self, messages, tokenize):
        assert not tokenize
        return "".join(f"<{message['role']}>{message['content']}" for message in messages)


def test_conversations_become_text_through_the_chat_template(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="the extra `calibrate` is not installed")
    from pyarrow import parquet

    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": talk}) + "\n" + json.dumps({"text": "plain"}))
    parquet.write_table(pyarrow.table({"messages": [talk, None], "text": [None, "plain"]}), tmp_path / "b.parquet")
    for name in ("a.jsonl", "b.parquet"):
        assert corpus.read_documents(str(tmp_path / name), Template()) == ["<user>Hi<assistant>Ho", "plain"]
        with pytest.raises(UserError, match="no chat template"):
            corpus.read_documents(str(tmp_path / name))
    (tmp_path / "c.jsonl").write_text('{"messages": [{"role": "user"}]}')
    with pytest.raises(UserError, match="the chat template refuses a record's 'messages'"):
        corpus.read_documents(str(tmp_path / "c.jsonl"), Template())
    (tmp_path / "d.jsonl").write_text('{"messages": "Hi"}')
    with pytest.raises(UserError, match="line 1 is not a JSON object with a 'text' or 'messages' field"):
        corpus.read_documents(str(tmp_path / "d.jsonl"), Template())


def test_a_file_of_any_name_is_text(tmp_path):
    (tmp_path / "NOTES").write_text("x")
    assert corpus.read_text(str(tmp_path / "NOTES")) == "x"


# The embedded text


def test_the_evaluation_split_is_disjoint_from_the_rest():
    names = Counter()
    for kind, documents in corpus.embedded_documents().items():
        sides = {side: {n for n in documents if corpus.is_evaluation_document(n) == side} for side in (True, False)}
        assert len(sides[True]) > 10 and len(sides[False]) > 2 * len(sides[True]), kind
        assert not {documents[n] for n in sides[True]} & {documents[n] for n in sides[False]}
        names.update(list(documents))
    # No module contributes both its code and its docstrings.
    assert names.most_common(1)[0][1] == 1


@pytest.mark.parametrize("evaluation", [True, False])
def test_the_embedded_text_is_a_mixture_of_its_kinds(evaluation, words):
    got = [words.decode(row) for row in corpus.windows(words, EMBEDDED, 9, 256, evaluation=evaluation).ids]
    for i, (kind, documents) in enumerate(corpus.embedded_documents().items()):
        side = [text for name, text in sorted(documents.items()) if corpus.is_evaluation_document(name) == evaluation]
        for text in got[i::3]:
            # A window may begin in one document and end in the next.
            assert any(part in document for document in side for part in (text[:100], text[-100:])), kind


@pytest.mark.parametrize("evaluation", [True, False])
def test_seeds_give_different_reproducible_mixtures(evaluation, words):
    mixture = {seed: corpus.windows(words, EMBEDDED, 6, 64, evaluation=evaluation, seed=seed) for seed in range(4)}
    assert len({text.sha256 for text in mixture.values()}) == 4
    for seed, text in mixture.items():
        assert text.sha256 == corpus.windows(words, EMBEDDED, 6, 64, evaluation=evaluation, seed=seed).sha256


def test_fewer_windows_are_a_prefix_of_more(words):
    for seed in (0, 1):
        few, many = (corpus.windows(words, EMBEDDED, n, 64, seed=seed).ids for n in (5, 50))
        assert torch.equal(few, many[:5])


# Overlap


def tokens(seed, windows, seqlen, vocab=5000):
    return torch.randint(0, vocab, (windows, seqlen), generator=torch.Generator().manual_seed(seed))


CASES = {
    "seqlens": st.tuples(*[st.sampled_from([SHINGLE, 64, 200, LONG, LONG + 1, 500, 2048])] * 2),
    "at": st.tuples(*[st.floats(0, 1)] * 2),
    "seed": st.integers(0, 10**6),
    "vocab": st.sampled_from([64, 300, 50_000]),
}


@given(**CASES)
def test_detects_200_shared_tokens_at_any_position(seqlens, at, seed, vocab):
    tuned, evaluated = (tokens(seed + i, 4096 // t, t, vocab) for i, t in enumerate(seqlens))
    here, there = (int(share * (ids.numel() - 200)) for share, ids in zip(at, (tuned, evaluated), strict=True))
    evaluated.view(-1)[there : there + 200] = tuned.view(-1)[here : here + 200]
    matches = overlap.overlapping(Windows(evaluated, "evaluated"), overlap.passages(Windows(tuned, "tuned")))
    touched = set(range(there // seqlens[1], (there + 199) // seqlens[1] + 1))
    assert matches and matches <= touched


@given(**CASES)
def test_disjoint_texts_do_not_overlap(seqlens, at, seed, vocab):
    tuned, evaluated = (tokens(seed + i, 4096 // t, t, vocab) for i, t in enumerate(seqlens))
    assert overlap.overlapping(Windows(evaluated, "evaluated"), overlap.passages(Windows(tuned, "tuned"))) == set()


@pytest.mark.parametrize(
    ("shared", "distinct", "overlaps"),
    [(SHINGLE, SHINGLE, True), (SHINGLE - 1, SHINGLE - 1, False), (60, DISTINCT, True), (60, DISTINCT - 1, False)],
)
def test_a_common_phrase_or_a_ruler_is_no_overlap(shared, distinct, overlaps):
    tuned, evaluated = tokens(0, 4, 64), tokens(1, 4, 64)
    for ids in (tuned, evaluated):
        ids.view(-1)[70 : 70 + shared] = 6000 + torch.arange(shared) % distinct
    assert bool(overlap.overlapping(Windows(evaluated, "e"), overlap.passages(Windows(tuned, "t")))) == overlaps


def test_passages_round_trip_through_their_file(tmp_path):
    passages = overlap.passages(Windows(tokens(0, 4, 64), "t"))
    assert len(passages) == 4 * 64 - SHINGLE + 1 and max(passages) > 2**63
    (tmp_path / overlap.PASSAGES).write_text(json.dumps(passages))
    assert overlap.read_passages(tmp_path / overlap.PASSAGES) == passages


def test_overlapping_windows_are_dropped_from_the_embedded_text_alone():
    """Licences occur in many documents; windows of the user's text are not dropped silently."""
    tuned, evaluated = tokens(0, 4, 64), tokens(1, 4, 64)
    evaluated[2] = tuned[1]
    passages = overlap.passages(Windows(tuned, "t"))
    disjoint = overlap.refuse_overlap(Windows(evaluated, EMBEDDED), passages, "t")
    assert torch.equal(disjoint.ids, evaluated[[0, 1, 3]]) and disjoint.source == EMBEDDED
    with pytest.raises(
        UserError, match=r"1 of 4 evaluation windows \(mine\) share text with the calibration text \(t\)"
    ):
        overlap.refuse_overlap(Windows(evaluated, "mine"), passages, "t")
    with pytest.raises(UserError, match="4 of 4"):
        overlap.refuse_overlap(Windows(tuned, EMBEDDED), passages, "t")
    assert overlap.refuse_overlap(Windows(tokens(2, 4, 64), "mine"), passages, "t").source == "mine"


def test_the_default_texts_of_convert_do_not_overlap(words):
    tuned = corpus.windows(words, EMBEDDED, 16, 512, seed=0)
    evaluated = corpus.windows(words, EMBEDDED, 8, 512, evaluation=True)
    disjoint = overlap.refuse_overlap(evaluated, overlap.passages(tuned), EMBEDDED)
    assert len(disjoint.ids) >= 6
    assert not overlap.overlapping(disjoint, overlap.passages(tuned))

    def runs(ids):
        return {tuple(row[i : i + 100]) for row in ids.tolist() for i in range(len(row) - 99)}

    # Passages of long windows are sampled: runs of this length must still be detected.
    assert not runs(tuned.ids) & runs(disjoint.ids)


def test_json_lines_are_numbered_as_in_the_file_and_end_at_line_feeds_only():
    lines = ['{"text": "a\u2028b\u0085c"}', "", " ", '{"text": 1}', "no JSON", '{"text": "\\ud800"}', '{"text": ""}']
    read = list(records.json_lines("\n".join(lines).split("\n"), records.text_field))
    assert read == [(1, "a\u2028b\u0085c"), (4, None), (5, None), (6, None), (7, "")]
