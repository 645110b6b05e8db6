"""`draft regenerate` and `draft vocab` on tiny models: greedy answers, without duplicates and evaluation prompts."""

import json
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file

from mlaforge.artifact import Manifest
from mlaforge.checkpoint.source_model import load_tokenizer
from mlaforge.drafting import dataset, regenerate, vocabulary
from mlaforge.drafting.config import RegenerateConfig, VocabularyConfig
from mlaforge.drafting.dataset import Excluded, read_answers, split
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.runtime import Interrupted, UserError
from mlaforge.synthesis import user_turn
from support.engine_driver import Oracle

LONG = (
    "Compose an engaging travel blog post about a recent trip to Hawaii, highlighting cultural experiences and sights."
)


def prompts_file(folder, name, prompts):
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text("".join(json.dumps({"turns": [text, "and then?"]}) + "\n" for text in prompts), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def prompts_path(tmp_path_factory):
    """60 prompts; the last two repeat others."""
    prompts = [f"Tell me about {n}." for n in range(58)]
    return prompts_file(
        tmp_path_factory.mktemp("prompts"), "asked.jsonl", [*prompts, prompts[3], "  tell ME about 4. "]
    )


def config(*prompts, **options):
    defaults = {"dtype": "float32", "device": "cpu", "cache_bytes": 1 << 20, "max_new_tokens": 12, "max_num_seqs": 8}
    return RegenerateConfig(prompts=prompts or None, **{**defaults, **options})


@pytest.fixture(scope="module")
def written(prompts_path, tiny_models, tmp_path_factory):
    out = tmp_path_factory.mktemp("regenerated") / "text"
    return out, regenerate.run(str(tiny_models["llama"]), out, config(prompts_path))


def test_answers_match_greedy_decoding(written, tiny_models):
    out, manifest = written
    _, answers = read_answers(out)
    assert [answer.number for answer in answers] == list(range(58))
    assert manifest.metrics["dropped"] == {"said before": 2}
    oracle, tokenizer = Oracle(tiny_models["llama"]), load_tokenizer(tiny_models["llama"])
    (end,) = tokenizer("\n")["input_ids"]
    for answer in answers[:6]:
        ids = answer.answer_ids
        oracle.check(answer.prompt_ids, ids, len(ids))
        # The answer includes its end token.
        assert len(ids) == 12 or ids[-1] in (258, end)
        prompts = f"user: Tell me about {answer.number}.\nassistant:"
        assert tokenizer.decode(answer.prompt_ids, skip_special_tokens=True) == prompts
    assert manifest.metrics["answer_tokens"] == sum(len(answer.answer_ids) for answer in answers)


def test_excluded_prompts_are_skipped(prompts_path, tiny_models, tmp_path):
    more = prompts_file(
        tmp_path / "p", "more.jsonl", [f"Please: {LONG} Thank you.", LONG.upper(), "Say something else."]
    )
    eval_file = prompts_file(tmp_path / "p", "judged.jsonl", [LONG, "tell me  about 7."])
    done = regenerate.run(
        str(tiny_models["llama"]), tmp_path / "text", config(prompts_path, more, exclude=(eval_file,))
    )
    assert done.metrics["dropped"] == {"said before": 2, "excluded": 3}
    prompts = [json.loads(line)["said"] for line in (tmp_path / "text" / "text.jsonl").read_text().splitlines()]
    assert (
        "Say something else." in prompts
        and "Tell me about 7." not in prompts
        and not any("Hawaii" in s for s in prompts)
    )
    assert len(done.inputs["exclude"]) == 1


def test_overlap_needs_thirteen_consecutive_words():
    split = LONG.split()
    excluded = Excluded([LONG])
    assert " ".join(["Well,", *split[1:14], "no?"]) in excluded
    assert " ".join(split[:12]) not in excluded and " ".join(reversed(split)) not in excluded


def test_an_interrupted_run_resumes(prompts_path, written, tiny_models, tmp_path, monkeypatch):
    answered, handled = regenerate.Regeneration._handle_output, []

    def interrupt_at_20(self, number, request, token_ids):
        if len(handled) == 20:
            raise KeyboardInterrupt
        handled.append(number)
        return answered(self, number, request, token_ids)

    monkeypatch.setattr(regenerate.Regeneration, "_handle_output", interrupt_at_20)
    out, work = tmp_path / "text", tmp_path / ".text.partial" / "work" / "text.jsonl"
    with pytest.raises(Interrupted):
        regenerate.run(str(tiny_models["llama"]), out, config(prompts_path))
    # A kill can leave an incomplete line.
    work.write_text(work.read_text() + '{"number": 58, "said": "Te')
    monkeypatch.setattr(
        regenerate.Regeneration, "_handle_output", lambda *args: (handled.append(args[1]), answered(*args))[1]
    )
    again = regenerate.run(str(tiny_models["llama"]), out, config(prompts_path))
    # The last two are duplicates and are skipped.
    assert sorted(handled) == list(range(58))
    assert (out / "text.jsonl").read_text() == (written[0] / "text.jsonl").read_text()
    assert again.fingerprint == written[1].fingerprint and again.metrics == written[1].metrics
    assert regenerate.run(str(tiny_models["llama"]), out, config(prompts_path)).fingerprint == again.fingerprint
    assert len(handled) == 58


@pytest.mark.parametrize("openings", [[], ["Tell us of", "And now?"]])
def test_sampled_questions(openings, tiny_models, tmp_path, monkeypatch):
    """A tiny model does not end its turns by itself: a logit bias makes it."""
    tokenizer = load_tokenizer(tiny_models["llama"])
    (end,) = tokenizer("\n")["input_ids"]
    monkeypatch.setattr(user_turn, "MIN_WORDS", 1)
    monkeypatch.setattr(user_turn, "MAX_QUESTION_TOKENS", 30)
    biased = {"logit_bias": {end: 3.5}}
    for module in (regenerate, user_turn):
        monkeypatch.setattr(module, "SamplingParams", lambda **options: SamplingParams(**options, **biased))
    options = {"synthesize": 16, "max_new_tokens": 2}
    if openings:
        (tmp_path / "openings.txt").write_text("\n\n".join(openings) + " \n")
        options["openings"] = (str(tmp_path / "openings.txt"),)
    done = regenerate.run(str(tiny_models["llama"]), tmp_path / "text", config(**options))
    _, answers = read_answers(tmp_path / "text")
    assert done.metrics["answers"] == len(answers) >= 3
    assert done.metrics["answers"] + sum(done.metrics["dropped"].values()) == 16
    assert len(done.inputs["openings"]) == bool(openings)
    for line in (tmp_path / "text" / "text.jsonl").read_text().splitlines():
        # Sampled questions are rendered by the chat template, as user messages.
        line = json.loads(line)
        assert line["said"] == line["said"].strip() and "\n" not in line["said"]
        assert not openings or line["said"].startswith(openings[line["number"] % 2])
        assert line["prompt"] == tokenizer(f"<s>user: {line['said']}\nassistant:")["input_ids"]


def test_rejects_prompts_that_are_all_excluded(prompts_path, tiny_models, tmp_path):
    with pytest.raises(UserError, match="no prompt was answered"):
        regenerate.run(str(tiny_models["llama"]), tmp_path / "none", config(prompts_path, exclude=(prompts_path,)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--synthesize", "-1"], "synthesize = -1"),
        ([], "nothing to answer"),
        (["--prompts", "/nowhere.jsonl"], "cannot be read"),
        (["--prompts", "LINES"], "line 2 is not"),
        (["--synthesize", "1", "--openings", "/nowhere.txt"], "cannot be read"),
        (["--synthesize", "1", "--openings", "BLANK"], "no openings"),
        (["--prompts", "/nowhere.jsonl", "--openings", "LINES"], "begin questions"),
        (["--synthesize", "1", "--openings", "SPECIAL", "--dtype", "float32"], "contains a special token"),
        (
            ["--synthesize", "1", "--openings", "LONG", "--max-model-len", "64", "--dtype", "float32"],
            "there is room for 63",
        ),
    ],
)
def test_rejects_invalid_inputs(options, words, refused, tiny_models, tmp_path):
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"turns": ["a"]}\n{"text": "b"}\n')
    files = {"LINES": str(lines)}
    for name, text in (("BLANK", " \n\n"), ("SPECIAL", "Tell us\nof </s>"), ("LONG", "Tell us of " * 40)):
        files[name] = str(tmp_path / f"{name}.txt")
        (tmp_path / f"{name}.txt").write_text(text)
    options = [files.get(option, option) for option in options]
    refused(words, "draft", "regenerate", tiny_models["llama"], "--out", tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


# The vocabulary


def test_the_vocabulary_contains_the_most_frequent_tokens(written, tiny_models, tmp_path):
    out, _ = written
    done = vocabulary.run(str(tiny_models["llama"]), [out], tmp_path / "vocab", VocabularyConfig(size=40))
    train_answers, validation_answers = split(read_answers(out)[1])
    token_counts = Counter(token for answer in train_answers for token in answer.answer_ids)
    ids = vocabulary.read(tmp_path / "vocab", 260).tolist()
    assert len(ids) == 40 and ids == sorted(set(ids)) and {256, 257, 258} <= set(ids)
    lowest = min(token_counts[i] for i in ids if i not in (256, 257, 258))
    assert all(token_counts[i] <= lowest for i in range(260) if i not in ids)
    eval_file = [token for answer in validation_answers for token in answer.answer_ids]
    expected = sum(token in ids for token in eval_file) / len(eval_file)
    assert done.metrics["coverage"]["40"]["held_out"] == pytest.approx(expected)
    assert done.metrics["held_out_tokens"] == len(eval_file)
    options = load_file(tmp_path / "vocab" / vocabulary.FILE)
    assert (options["d2t"] + torch.arange(40)).tolist() == options["t2d"].nonzero()[:, 0].tolist() == ids


def test_the_split_depends_on_the_prompt_alone(written):
    _, answers = read_answers(written[0])
    train_answers, validation_answers = split(answers)
    assert {a.number for a in validation_answers} == {a.number for a in split(list(reversed(answers)))[1]} and len(
        train_answers
    ) > len(validation_answers)
    assert len(split(answers + answers)[0]) == len(train_answers)
    with pytest.raises(UserError, match="too few"):
        split(train_answers)


def test_rejects_invalid_vocabularies(written, tiny_models, tmp_path, refused):
    out, _ = written
    refused("size = 2", "draft", "vocab", tiny_models["llama"], out, "--out", tmp_path / "v", "--size", 2)
    refused("size = 300", "draft", "vocab", tiny_models["llama"], out, "--out", tmp_path / "v", "--size", 300)
    refused(
        "was not written by", "draft", "vocab", tiny_models["llama"], tmp_path, "--out", tmp_path / "v", "--size", 30
    )
    vocabulary.run(str(tiny_models["llama"]), [out], tmp_path / "v", VocabularyConfig(size=40))
    with pytest.raises(UserError, match="for 260 tokens, the model has 300"):
        vocabulary.read(tmp_path / "v", 300)
    stored = load_file(tmp_path / "v" / vocabulary.FILE)
    save_file({**stored, "t2d": ~stored["t2d"]}, tmp_path / "v" / vocabulary.FILE)
    with pytest.raises(UserError, match=r"damaged: .* other tokens than t2d marks"):
        vocabulary.read(tmp_path / "v", 260)
    (tmp_path / "v" / vocabulary.FILE).write_bytes(b"no tensors")
    with pytest.raises(UserError, match="damaged"):
        vocabulary.read(tmp_path / "v", 260)


@pytest.mark.parametrize("line", ['{"number": 1}', '{"number": 1, "prompt": [1], "answer": []}', "[]", "{",
                                  '{"number": 1, "prompt": [1], "answer": [1.5]}'])  # fmt: skip
def test_rejects_damaged_text(line, tmp_path):
    (tmp_path / "text").mkdir()
    Manifest(dataset.STAGE, {}, {}).save(tmp_path / "text")
    (tmp_path / "text" / dataset.TEXT_FILE).write_text(line + "\n")
    with pytest.raises(UserError, match="line 1 is damaged"):
        read_answers(tmp_path / "text")


def test_check_unseen(tmp_path):
    """Accepts files that all training text excludes; rejects others, or reports that the training text is unknown."""

    def head(name, *excludes, init=None, stage=dataset.TRAIN_STAGE):
        (tmp_path / name).mkdir()
        Manifest(stage, {}, {"text": [{"exclude": list(answers)} for answers in excludes], "init": init}).save(
            tmp_path / name
        )
        return tmp_path / name

    one, two, embedded = ({"path": n, "sha256": s} for n, s in (("one.jsonl", "1"), ("two.txt", "2"), ("embedded", "")))
    both = head("both", ["1", "2"], ["3", "2", "1"])
    assert dataset.check_unseen(both, [one, two]) == ""
    assert "embedded" in dataset.check_unseen(both, [one, embedded])
    for name, excludes in (("some", (["1", "2"], ["1"])), ("none", ([],)), ("other", (["3"],))):
        with pytest.raises(UserError, match=r"does not exclude two\.txt"):
            dataset.check_unseen(head(name, *excludes), [two])
    assert "was initialised from a head whose training text is unknown" in dataset.check_unseen(
        head("again", ["1"], init={"text": None}), [one]
    )
    # The text of its initial heads counts too.
    assert dataset.training_texts(tmp_path / "imported-1") is None
    known = head("known", ["1", "2"], init={"text": dataset.training_texts(head("first", ["2"]))})
    assert [text["exclude"] for text in dataset.training_texts(known)] == [["1", "2"], ["2"]]
    assert dataset.check_unseen(known, [two]) == ""
    with pytest.raises(UserError, match=r"does not exclude one\.jsonl"):
        dataset.check_unseen(known, [one])
    assert "no manifest records" in dataset.check_unseen(head("imported", stage="draft import"), [one])
    assert "no manifest records" in dataset.check_unseen(tmp_path, [one])
    with pytest.raises(UserError, match="damaged"):
        dataset.check_unseen(head("empty"), [one])


def test_plain_text_can_be_excluded(tmp_path):
    path = tmp_path / "judged.txt"
    path.write_text("It begins so. " + LONG)
    assert " ".join(LONG.split()[:13]) in Excluded(dataset.read_eval_texts(path))
    with pytest.raises(UserError, match="cannot be read"):
        dataset.read_eval_texts(tmp_path / "nothing.txt")
