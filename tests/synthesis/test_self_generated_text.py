"""Self-generated calibration text: deterministic across interruptions, and models that cannot generate any.

A tiny random model writes noise and would be rejected; most tests switch that check off.
"""

import json
import math

import pytest
import torch
import yaml

from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.data import corpus, overlap
from mlaforge.runtime import Interrupted, UserError
from mlaforge.synthesis import self_generated_text as module
from mlaforge.synthesis.repetition import distinct_ngram_ratio, repetition_reason
from mlaforge.synthesis.self_generated_text import SelfGeneratedText, SelfGenerationError, self_generated_text


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty cache folder, with short texts."""
    monkeypatch.setattr(module, "cache_home", lambda: tmp_path)
    for name, value in (
        ("MAX_NEW_TOKENS", 48),
        ("MIN_NEW_TOKENS", 4),
        ("MAX_PROMPT_TOKENS", 300),
        ("NOISE_THRESHOLD", math.inf),
    ):
        monkeypatch.setattr(module, name, value)
    return tmp_path


@pytest.fixture
def llama(tiny_models):
    return SourceModel.open(tiny_models["llama"])


def generate(source, tokens, seed=0, **more):
    return self_generated_text(source, tokens, seed, "cpu", **more)


def text_folder(home):
    (folder,) = (home / "self").iterdir()
    return folder


def test_a_longer_request_extends_a_shorter_one(home, llama, tmp_path, monkeypatch):
    short = generate(llama, 1000)
    assert 1000 <= short.tokens < 1000 + 400
    more = generate(llama, 3000)
    monkeypatch.setattr(module, "cache_home", lambda: tmp_path / "another")
    direct = generate(llama, 3000)
    assert more.lines == direct.lines and more.lines[: len(short.lines)] == short.lines
    assert generate(llama, 1000, seed=1).lines != short.lines
    kinds = {line["kind"] for line in more.lines}
    assert {"prose", "python", "tables", "dialogue"} <= kinds, kinds


def test_cached_texts_are_not_generated_again(home, llama, monkeypatch):
    text = generate(llama, 1500)
    monkeypatch.setattr(module, "LLM", None)
    assert generate(llama, 1500).lines == text.lines
    assert generate(llama, 700).tokens < text.tokens


def test_an_interrupted_run_resumes(home, llama, tmp_path, monkeypatch):
    handle_output, count = module._Generator._handle_output, []

    def interrupt_at_25(*args):
        count.append(args[1])
        if len(count) == 25:
            raise KeyboardInterrupt
        return handle_output(*args)

    with monkeypatch.context() as patch:
        patch.setattr(module._Generator, "_handle_output", interrupt_at_25)
        with pytest.raises(Interrupted, match="resumes"):
            generate(llama, 2500)
    texts = text_folder(home) / module.TEXTS_FILE
    before = texts.read_text()
    # A kill can leave an incomplete line.
    texts.write_text(before + '{"number": 3, "ki')
    text = generate(llama, 2500)
    assert texts.read_text().startswith(before)
    monkeypatch.setattr(module, "cache_home", lambda: tmp_path / "another")
    assert generate(llama, 2500).lines == text.lines


def test_short_texts_do_not_cause_overproduction(home, llama, monkeypatch):
    """Short texts finish first: their length must not lower the estimate for those in progress."""
    begin, short = module._Generator._start, {"kind": "prose", "dropped": "too short"}
    monkeypatch.setattr(module._Generator, "_start", lambda self, n: dict(short) if n < 3 else begin(self, n))
    assert generate(llama, 1000).tokens >= 1000
    texts = (text_folder(home) / module.TEXTS_FILE).read_text().splitlines()
    # Where a random model's texts end differs by processor.
    assert len(texts) <= 3 + math.ceil(1000 / (0.4 * module.MAX_NEW_TOKENS))


def test_full_disk_is_a_user_error_and_keeps_finished_texts(home, llama, monkeypatch, small_disk, tmp_path):
    """One error line; the texts generated before stay valid."""
    disk = small_disk(2**15)
    monkeypatch.setattr(module, "cache_home", lambda: disk)
    with pytest.raises(UserError, match=r"the disk is full \(0.0 GiB free at .*MLAFORGE_HOME.* resumes"):
        generate(llama, 12_000)
    drawn = (text_folder(disk) / module.TEXTS_FILE).read_bytes()
    assert len(drawn) > 2**13
    monkeypatch.setattr(module, "cache_home", lambda: tmp_path / "another")
    assert generate(llama, 12_000).tokens >= 12_000
    (moved := text_folder(tmp_path / "another") / module.TEXTS_FILE).write_bytes(drawn)
    assert generate(llama, 12_000).tokens >= 12_000
    assert moved.read_bytes().startswith(drawn[: drawn.rfind(b"\n") + 1])


def test_rejects_a_random_model(home, llama, monkeypatch):
    monkeypatch.setattr(module, "NOISE_THRESHOLD", 0.8)
    with pytest.raises(SelfGenerationError, match="close to that of a random model") as first:
        generate(llama, 500)
    monkeypatch.setattr(module, "LLM", None)
    with pytest.raises(SelfGenerationError) as again:
        generate(llama, 500)
    assert str(again.value) == str(first.value)


def test_token_budget_follows_the_measured_pace(home, llama, monkeypatch, capsys):
    monkeypatch.setattr(module, "PACE_SECONDS", 0.0)
    monkeypatch.setattr(module, "TOKEN_BUDGETS", (8000, 4000, 2000))
    # A fixed pace that allows 4,000 tokens.
    allow = module._Generator._set_token_budget
    monkeypatch.setattr(
        module._Generator, "_set_token_budget", lambda self, pace: allow(self, 5000 / module.MAX_SECONDS)
    )
    text = generate(llama, 9000)
    assert 4000 <= text.tokens < 4400
    assert "there is time for 4,000" in capsys.readouterr().err
    # The budget is saved, so no engine is needed.
    monkeypatch.setattr(module, "LLM", None)
    assert generate(llama, 9000).lines == text.lines


def test_rejects_a_model_that_is_too_slow(home, llama, monkeypatch):
    monkeypatch.setattr(module, "PACE_SECONDS", 0.0)
    monkeypatch.setattr(module, "MAX_SECONDS", 1e-6)
    with pytest.raises(SelfGenerationError, match="16,384 tokens would take"):
        generate(llama, 500)
    assert json.loads((text_folder(home) / module.LIMIT_FILE).read_text())["tokens"] == 0


def test_rejects_a_model_that_does_not_fit_into_memory(home, llama, monkeypatch):
    monkeypatch.setattr(module, "free_bytes", lambda device: 1000)
    with pytest.raises(SelfGenerationError, match="GiB are free"):
        generate(llama, 500)
    # Memory may be freed later: the error is not cached.
    monkeypatch.undo()
    monkeypatch.setattr(module, "cache_home", lambda: home)
    monkeypatch.setattr(module, "NOISE_THRESHOLD", math.inf)
    assert generate(llama, 500).tokens >= 500


def test_repetitive_texts_are_dropped_and_counted(home, llama, monkeypatch):
    monkeypatch.setattr(module, "repetition_reason", lambda ids, text: "repeated lines" if len(ids) % 2 else "")
    text = generate(llama, 1500)
    sheet = json.loads((text_folder(home) / "datasheet.json").read_text())
    lines = [json.loads(line) for line in (text_folder(home) / module.TEXTS_FILE).read_text().splitlines()]
    assert sum(kind["texts"] for kind in sheet["kinds"].values()) == sum("ids" in line for line in lines)
    dropped = sum(kind["dropped"].get("repeated lines", 0) for kind in sheet["kinds"].values())
    assert dropped == sum(line.get("dropped") == "repeated lines" for line in lines) > 0
    assert text.tokens >= 1500 and "repeated lines" in (text_folder(home) / "datasheet.md").read_text()
    monkeypatch.setattr(module, "repetition_reason", lambda ids, text: "repeated lines")
    with pytest.raises(SelfGenerationError, match="repeats itself"):
        generate(llama, 1500, seed=1)


def test_texts_with_evaluation_passages_are_left_out(home, llama):
    text = generate(llama, 3000)
    eval_passages = overlap.passages(corpus.Windows(torch.tensor([text.lines[2]["ids"]]), ""))
    assert eval_passages
    filtered = generate(llama, 3000, eval_passages=eval_passages)
    assert text.lines[2]["number"] not in {line["number"] for line in filtered.lines} and filtered.tokens >= 3000
    assert filtered.lines[:2] == text.lines[:2]


def test_base_models_get_no_dialogue(home, model):
    base = model("llama")
    path = base / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("chat_template", None)
    path.write_text(json.dumps(config))
    (base / "chat_template.jinja").unlink(missing_ok=True)
    source = SourceModel.open(base)
    assert not source.tokenizer.chat_template
    kinds = {line["kind"] for line in generate(source, 3000).lines}
    assert "prose" in kinds and not {"dialogue", "question"} & kinds


def test_texts_contain_no_bos_and_eos(home, llama):
    """Texts start with their opening or their chat template, and windows join them without special tokens."""
    openings = yaml.safe_load(module.OPENINGS.read_text())
    special = set(llama.tokenizer.all_special_ids)
    text = generate(llama, 3000)
    names = dict(text.documents())
    for line in text.lines:
        words = names[f"{line['kind']}/{line['number']}"]
        if line["kind"] in ("dialogue", "question"):
            assert words.startswith("<s>user: ")
        else:
            assert any(words.startswith(opening) for opening in openings[line["kind"]])
            assert line["ids"][0] not in special and line["ids"][-1] not in special
    windows = text.windows(5, 64)
    assert windows.ids.shape == (5, 64) and windows.source == corpus.SELF
    assert windows.ids.flatten().tolist()[: len(text.lines[0]["ids"])] == text.lines[0]["ids"][: 5 * 64]
    assert (
        SelfGeneratedText(llama.tokenizer, text.lines[:1]).windows(100, 64).ids.shape[0]
        == len(text.lines[0]["ids"]) // 64
    )


def test_openings_are_distinct_and_stripped():
    """Many kinds, no duplicates, no trailing blanks (a blank is the start of the next token)."""
    openings = yaml.safe_load(module.OPENINGS.read_text())
    texts = [text for texts in openings.values() for text in texts]
    assert len(openings) >= 8 and len(set(texts)) == len(texts) >= 150
    assert all(text == text.rstrip() for text in texts)


def test_repetition_reason():
    assert distinct_ngram_ratio([1, 2, 3]) is None
    assert distinct_ngram_ratio([1, 2, 3, 4, 1, 2, 3, 4]) == 4 / 5
    varied = list(range(300))
    assert repetition_reason(varied, "words") == ""
    assert repetition_reason(varied + [1, 2] * 60, "words") == "few distinct runs of tokens"
    # Also with varied text after the loop.
    assert repetition_reason([*varied, *[7] * 200, *range(300, 500)], "words") == "few distinct runs of tokens"
    listed = "\n".join(f"{n}. a step of it" for n in range(20))
    assert repetition_reason(varied, listed) == ""
    assert repetition_reason(varied, "The same.\n" * 12 + listed[:40]) == "repeated lines"
    # Rulers and blank lines of tables do not count.
    assert repetition_reason(varied, "---\n\n" * 20 + "| a |\n| b |") == ""
