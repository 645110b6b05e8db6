"""`draft regenerate` and `draft vocab` on tiny models: the target's own answers, each once, none that is judged on."""

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


def prompts_file(folder, name, said):
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text("".join(json.dumps({"turns": [text, "and then?"]}) + "\n" for text in said), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """60 prompts; the last two repeat others."""
    said = [f"Tell me about {n}." for n in range(58)]
    return prompts_file(tmp_path_factory.mktemp("prompts"), "asked.jsonl", [*said, said[3], "  tell ME about 4. "])


def config(*prompts, **options):
    few = {"dtype": "float32", "device": "cpu", "cache_bytes": 1 << 20, "max_new_tokens": 12, "max_num_seqs": 8}
    return RegenerateConfig(prompts=prompts or None, **{**few, **options})


@pytest.fixture(scope="module")
def written(asked, tiny_models, tmp_path_factory):
    out = tmp_path_factory.mktemp("regenerated") / "text"
    return out, regenerate.run(str(tiny_models["llama"]), out, config(asked))


def test_answers_are_the_targets_own(written, tiny_models):
    out, manifest = written
    _, found = read_answers(out)
    assert [answer.number for answer in found] == list(range(58))
    assert manifest.metrics["dropped"] == {"said before": 2}
    oracle, tokenizer = Oracle(tiny_models["llama"]), load_tokenizer(tiny_models["llama"])
    (end,) = tokenizer("\n")["input_ids"]
    for answer in found[:6]:
        ids = answer.answer_ids
        oracle.check(answer.prompt_ids, ids, len(ids))
        # The token that ends it is part of it.
        assert len(ids) == 12 or ids[-1] in (258, end)
        said = f"user: Tell me about {answer.number}.\nassistant:"
        assert tokenizer.decode(answer.prompt_ids, skip_special_tokens=True) == said
    assert manifest.metrics["answer_tokens"] == sum(len(answer.answer_ids) for answer in found)


def test_what_is_judged_on_is_not_asked(asked, tiny_models, tmp_path):
    more = prompts_file(
        tmp_path / "p", "more.jsonl", [f"Please: {LONG} Thank you.", LONG.upper(), "Say something else."]
    )
    judged = prompts_file(tmp_path / "p", "judged.jsonl", [LONG, "tell me  about 7."])
    done = regenerate.run(str(tiny_models["llama"]), tmp_path / "text", config(asked, more, exclude=(judged,)))
    assert done.metrics["dropped"] == {"said before": 2, "excluded": 3}
    said = [json.loads(line)["said"] for line in (tmp_path / "text" / "text.jsonl").read_text().splitlines()]
    assert "Say something else." in said and "Tell me about 7." not in said and not any("Hawaii" in s for s in said)
    assert len(done.inputs["exclude"]) == 1


def test_only_runs_of_thirteen_words_are_overlap():
    split = LONG.split()
    excluded = Excluded([LONG])
    assert " ".join(["Well,", *split[1:14], "no?"]) in excluded
    assert " ".join(split[:12]) not in excluded and " ".join(reversed(split)) not in excluded


def test_a_broken_off_run_loses_nothing(asked, written, tiny_models, tmp_path, monkeypatch):
    answered, kept = regenerate.Regeneration._handle_output, []

    def stops(self, number, request, token_ids):
        if len(kept) == 20:
            raise KeyboardInterrupt
        kept.append(number)
        return answered(self, number, request, token_ids)

    monkeypatch.setattr(regenerate.Regeneration, "_handle_output", stops)
    out, work = tmp_path / "text", tmp_path / ".text.partial" / "work" / "text.jsonl"
    with pytest.raises(Interrupted):
        regenerate.run(str(tiny_models["llama"]), out, config(asked))
    # A kill may come in the middle of a line.
    work.write_text(work.read_text() + '{"number": 58, "said": "Te')
    monkeypatch.setattr(
        regenerate.Regeneration, "_handle_output", lambda *given: (kept.append(given[1]), answered(*given))[1]
    )
    again = regenerate.run(str(tiny_models["llama"]), out, config(asked))
    # The last two repeat others and are not asked.
    assert sorted(kept) == list(range(58))
    assert (out / "text.jsonl").read_text() == (written[0] / "text.jsonl").read_text()
    assert again.fingerprint == written[1].fingerprint and again.metrics == written[1].metrics
    assert regenerate.run(str(tiny_models["llama"]), out, config(asked)).fingerprint == again.fingerprint
    assert len(kept) == 58


@pytest.mark.parametrize("openings", [[], ["Tell us of", "And now?"]])
def test_questions_of_its_own(openings, tiny_models, tmp_path, monkeypatch):
    """A tiny model draws no text: a bias has it end its turns."""
    tokenizer = load_tokenizer(tiny_models["llama"])
    (end,) = tokenizer("\n")["input_ids"]
    monkeypatch.setattr(user_turn, "MIN_WORDS", 1)
    monkeypatch.setattr(user_turn, "MAX_QUESTION_TOKENS", 30)
    biased = {"logit_bias": {end: 3.5}}
    for module in (regenerate, user_turn):
        monkeypatch.setattr(module, "SamplingParams", lambda **told: SamplingParams(**told, **biased))
    options = {"synthesize": 16, "max_new_tokens": 2}
    if openings:
        (tmp_path / "openings.txt").write_text("\n\n".join(openings) + " \n")
        options["openings"] = (str(tmp_path / "openings.txt"),)
    done = regenerate.run(str(tiny_models["llama"]), tmp_path / "text", config(**options))
    _, found = read_answers(tmp_path / "text")
    assert done.metrics["answers"] == len(found) >= 3
    assert done.metrics["answers"] + sum(done.metrics["dropped"].values()) == 16
    assert len(done.inputs["openings"]) == bool(openings)
    for line in (tmp_path / "text" / "text.jsonl").read_text().splitlines():
        # Asked again through the template, as a user's words would be.
        line = json.loads(line)
        assert line["said"] == line["said"].strip() and "\n" not in line["said"]
        assert not openings or line["said"].startswith(openings[line["number"] % 2])
        assert line["prompt"] == tokenizer(f"<s>user: {line['said']}\nassistant:")["input_ids"]


def test_nothing_left_to_answer(asked, tiny_models, tmp_path):
    with pytest.raises(UserError, match="no prompt was left"):
        regenerate.run(str(tiny_models["llama"]), tmp_path / "none", config(asked, exclude=(asked,)))
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
        (["--synthesize", "1", "--openings", "SPECIAL", "--dtype", "float32"], "holds a special token"),
        (
            ["--synthesize", "1", "--openings", "LONG", "--max-model-len", "64", "--dtype", "float32"],
            "there is room for 63",
        ),
    ],
)
def test_what_cannot_be_answered_is_refused(options, words, refused, tiny_models, tmp_path):
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


def test_a_vocabulary_is_what_is_said_most_often(written, tiny_models, tmp_path):
    out, _ = written
    done = vocabulary.run(str(tiny_models["llama"]), [out], tmp_path / "vocab", VocabularyConfig(size=40))
    learnt, held = split(read_answers(out)[1])
    counted = Counter(token for answer in learnt for token in answer.answer_ids)
    ids = vocabulary.read(tmp_path / "vocab", 260).tolist()
    assert len(ids) == 40 and ids == sorted(set(ids)) and {256, 257, 258} <= set(ids)
    least = min(counted[i] for i in ids if i not in (256, 257, 258))
    assert all(counted[i] <= least for i in range(260) if i not in ids)
    judged = [token for answer in held for token in answer.answer_ids]
    wanted = sum(token in ids for token in judged) / len(judged)
    assert done.metrics["coverage"]["40"]["held_out"] == pytest.approx(wanted)
    assert done.metrics["held_out_tokens"] == len(judged)
    told = load_file(tmp_path / "vocab" / vocabulary.FILE)
    assert (told["d2t"] + torch.arange(40)).tolist() == told["t2d"].nonzero()[:, 0].tolist() == ids


def test_who_is_kept_back_depends_on_the_prompt_alone(written):
    _, found = read_answers(written[0])
    learnt, held = split(found)
    assert {a.number for a in held} == {a.number for a in split(list(reversed(found)))[1]} and len(learnt) > len(held)
    assert len(split(found + found)[0]) == len(learnt)
    with pytest.raises(UserError, match="too few"):
        split(learnt)


def test_vocabularies_that_fit_nothing_are_refused(written, tiny_models, tmp_path, refused):
    out, _ = written
    refused("size = 2", "draft", "vocab", tiny_models["llama"], out, "--out", tmp_path / "v", "--size", 2)
    refused("size = 300", "draft", "vocab", tiny_models["llama"], out, "--out", tmp_path / "v", "--size", 300)
    refused("not what", "draft", "vocab", tiny_models["llama"], tmp_path, "--out", tmp_path / "v", "--size", 30)
    vocabulary.run(str(tiny_models["llama"]), [out], tmp_path / "v", VocabularyConfig(size=40))
    with pytest.raises(UserError, match="of 260 tokens, the model's has 300"):
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
def test_damaged_text_is_refused(line, tmp_path):
    (tmp_path / "text").mkdir()
    Manifest(dataset.STAGE, {}, {}).save(tmp_path / "text")
    (tmp_path / "text" / dataset.TEXT).write_text(line + "\n")
    with pytest.raises(UserError, match="line 1 is damaged"):
        read_answers(tmp_path / "text")


def test_what_a_head_may_be_judged_on(tmp_path):
    """Files that all of its text is free of; of anything else it is refused, or said that nothing is known."""

    def head(name, *excludes, init=None, stage=dataset.TRAINED):
        (tmp_path / name).mkdir()
        Manifest(stage, {}, {"text": [{"exclude": list(found)} for found in excludes], "init": init}).save(
            tmp_path / name
        )
        return tmp_path / name

    one, two, embedded = ({"path": n, "sha256": s} for n, s in (("one.jsonl", "1"), ("two.txt", "2"), ("embedded", "")))
    both = head("both", ["1", "2"], ["3", "2", "1"])
    assert dataset.check_unseen(both, [one, two]) == ""
    assert "embedded" in dataset.check_unseen(both, [one, embedded])
    for name, excludes in (("some", (["1", "2"], ["1"])), ("none", ([],)), ("other", (["3"],))):
        with pytest.raises(UserError, match=r"need not be free of two\.txt"):
            dataset.check_unseen(head(name, *excludes), [two])
    assert "began as another" in dataset.check_unseen(head("again", ["1"], init={"text": None}), [one])
    # What it began as counts too.
    assert dataset.learnt_from(tmp_path / "imported-1") is None
    known = head("known", ["1", "2"], init={"text": dataset.learnt_from(head("first", ["2"]))})
    assert [text["exclude"] for text in dataset.learnt_from(known)] == [["1", "2"], ["2"]]
    assert dataset.check_unseen(known, [two]) == ""
    with pytest.raises(UserError, match=r"need not be free of one\.jsonl"):
        dataset.check_unseen(known, [one])
    assert "nothing says" in dataset.check_unseen(head("imported", stage="draft import"), [one])
    assert "nothing says" in dataset.check_unseen(tmp_path, [one])
    with pytest.raises(UserError, match="damaged"):
        dataset.check_unseen(head("empty"), [one])


def test_text_can_be_excluded(tmp_path):
    path = tmp_path / "judged.txt"
    path.write_text("It begins so. " + LONG)
    assert " ".join(LONG.split()[:13]) in Excluded(dataset.read_judged(path))
    with pytest.raises(UserError, match="cannot be read"):
        dataset.read_judged(tmp_path / "nothing.txt")
