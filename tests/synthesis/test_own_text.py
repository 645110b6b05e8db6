"""What a model writes to be calibrated on: the same texts however they come to be drawn, and a model that writes none.

A tiny random model writes noise, and is told from one that knows a language by it; here it is taken for such a one.
"""

import json
import math

import pytest
import torch
import yaml

from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.data import corpus, overlap
from mlaforge.runtime import Interrupted, UserError
from mlaforge.synthesis import own_text as module
from mlaforge.synthesis.own_text import CannotWrite, OwnText, own_text
from mlaforge.synthesis.repetition import distinct_share, loop


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty cache, in which texts are short."""
    monkeypatch.setattr(module, "cache_home", lambda: tmp_path)
    for name, value in (("LONGEST", 48), ("SHORTEST", 4), ("LONGEST_PROMPT", 300), ("NOISE", math.inf)):
        monkeypatch.setattr(module, name, value)
    return tmp_path


@pytest.fixture
def llama(tiny_models):
    return SourceModel.open(tiny_models["llama"])


def written(source, tokens, seed=0, **more):
    return own_text(source, tokens, seed, "cpu", **more)


def the_folder(home):
    (folder,) = (home / "self").iterdir()
    return folder


def test_a_longer_draw_begins_as_a_shorter_one(home, llama, tmp_path, monkeypatch):
    few = written(llama, 2000)
    assert 2000 <= few.tokens < 2000 + 400
    more = written(llama, 6000)
    monkeypatch.setattr(module, "cache_home", lambda: tmp_path / "another")
    at_once = written(llama, 6000)
    assert more.lines == at_once.lines and more.lines[: len(few.lines)] == few.lines
    assert written(llama, 6000, seed=1).lines != more.lines
    kinds = {line["kind"] for line in more.lines}
    assert {"prose", "python", "tables", "dialogue"} <= kinds, kinds


def test_nothing_is_drawn_twice(home, llama, monkeypatch):
    text = written(llama, 1500)
    monkeypatch.setattr(module, "LLM", None)
    assert written(llama, 1500).lines == text.lines
    assert written(llama, 700).tokens < text.tokens


def test_a_broken_off_draw_goes_on(home, llama, tmp_path, monkeypatch):
    answered, count = module._Draw._answered, []

    def stops(*given):
        count.append(given[1])
        if len(count) == 25:
            raise KeyboardInterrupt
        return answered(*given)

    with monkeypatch.context() as patch:
        patch.setattr(module._Draw, "_answered", stops)
        with pytest.raises(Interrupted, match="goes on"):
            written(llama, 4000)
    texts = the_folder(home) / module.TEXTS
    before = texts.read_text()
    # A kill may come in the middle of a line.
    texts.write_text(before + '{"number": 3, "ki')
    text = written(llama, 4000)
    assert texts.read_text().startswith(before)
    monkeypatch.setattr(module, "cache_home", lambda: tmp_path / "another")
    assert written(llama, 4000).lines == text.lines


def test_short_texts_ask_for_no_more_than_is_wanted(home, llama, monkeypatch):
    """Short texts end first: what they held says nothing of those under way."""
    begin, short = module._Draw._begin, {"kind": "prose", "dropped": "too short"}
    monkeypatch.setattr(module._Draw, "_begin", lambda self, n: dict(short) if n < 3 else begin(self, n))
    assert written(llama, 1000).tokens >= 1000
    texts = (the_folder(home) / module.TEXTS).read_text().splitlines()
    # What a random model draws, and so where its texts end, differs by processor.
    assert len(texts) <= 3 + math.ceil(1000 / (0.4 * module.LONGEST))


def test_a_full_disk(home, llama, monkeypatch, small_disk, tmp_path):
    """One line, and what was drawn counts."""
    disk = small_disk(2**16)
    monkeypatch.setattr(module, "cache_home", lambda: disk)
    with pytest.raises(UserError, match=r"the disk is full \(0.0 GiB free at .*MLAFORGE_HOME.* goes on"):
        written(llama, 40_000)
    drawn = (the_folder(disk) / module.TEXTS).read_bytes()
    assert len(drawn) > 2**14
    monkeypatch.setattr(module, "cache_home", lambda: tmp_path / "another")
    assert written(llama, 40_000).tokens >= 40_000
    (moved := the_folder(tmp_path / "another") / module.TEXTS).write_bytes(drawn)
    assert written(llama, 40_000).tokens >= 40_000
    assert moved.read_bytes().startswith(drawn[: drawn.rfind(b"\n") + 1])


def test_a_random_model_writes_nothing(home, llama, monkeypatch):
    monkeypatch.setattr(module, "NOISE", 0.8)
    with pytest.raises(CannotWrite, match="surprise it as much as noise") as first:
        written(llama, 500)
    monkeypatch.setattr(module, "LLM", None)
    with pytest.raises(CannotWrite) as again:
        written(llama, 500)
    assert str(again.value) == str(first.value)


def test_what_there_is_no_time_for(home, llama, monkeypatch, capsys):
    monkeypatch.setattr(module, "PACE_SECONDS", 0.0)
    monkeypatch.setattr(module, "TOKENS", (8000, 4000, 2000))
    # Whatever the pace, there is time for 4,000.
    allow = module._Draw._allow
    monkeypatch.setattr(module._Draw, "_allow", lambda self, pace: allow(self, 5000 / module.SECONDS))
    text = written(llama, 9000)
    assert 4000 <= text.tokens < 4400
    assert "there is time for 4,000" in capsys.readouterr().err
    # Now it is known.
    monkeypatch.setattr(module, "LLM", None)
    assert written(llama, 9000).lines == text.lines


def test_a_model_that_is_too_slow(home, llama, monkeypatch):
    monkeypatch.setattr(module, "PACE_SECONDS", 0.0)
    monkeypatch.setattr(module, "SECONDS", 1e-6)
    with pytest.raises(CannotWrite, match="16,384 tokens would take it"):
        written(llama, 500)
    assert json.loads((the_folder(home) / module.LIMIT).read_text())["tokens"] == 0


def test_a_model_that_does_not_fit(home, llama, monkeypatch):
    monkeypatch.setattr(module, "free_bytes", lambda device: 1000)
    with pytest.raises(CannotWrite, match="GiB are free"):
        written(llama, 500)
    # Another time there may be room.
    monkeypatch.undo()
    monkeypatch.setattr(module, "cache_home", lambda: home)
    monkeypatch.setattr(module, "NOISE", math.inf)
    assert written(llama, 500).tokens >= 500


def test_loops_are_dropped_and_counted(home, llama, monkeypatch):
    monkeypatch.setattr(module, "loop", lambda ids, text: "repeated lines" if len(ids) % 2 else "")
    text = written(llama, 1500)
    sheet = json.loads((the_folder(home) / "datasheet.json").read_text())
    lines = [json.loads(line) for line in (the_folder(home) / module.TEXTS).read_text().splitlines()]
    assert sum(kind["texts"] for kind in sheet["kinds"].values()) == sum("ids" in line for line in lines)
    dropped = sum(kind["dropped"].get("repeated lines", 0) for kind in sheet["kinds"].values())
    assert dropped == sum(line.get("dropped") == "repeated lines" for line in lines) > 0
    assert text.tokens >= 1500 and "repeated lines" in (the_folder(home) / "datasheet.md").read_text()
    monkeypatch.setattr(module, "loop", lambda ids, text: "repeated lines")
    with pytest.raises(CannotWrite, match="repeats itself"):
        written(llama, 1500, seed=1)


def test_what_is_judged_is_left_out(home, llama):
    text = written(llama, 3000)
    judged = overlap.passages(corpus.Windows(torch.tensor([text.lines[2]["ids"]]), ""))
    assert judged
    left = written(llama, 3000, judged=judged)
    assert text.lines[2]["number"] not in {line["number"] for line in left.lines} and left.tokens >= 3000
    assert left.lines[:2] == text.lines[:2]


def test_nobody_talks_with_a_base_model(home, model):
    base = model("llama")
    path = base / "tokenizer_config.json"
    told = json.loads(path.read_text())
    told.pop("chat_template", None)
    path.write_text(json.dumps(told))
    (base / "chat_template.jinja").unlink(missing_ok=True)
    source = SourceModel.open(base)
    assert not source.tokenizer.chat_template
    kinds = {line["kind"] for line in written(source, 6000).lines}
    assert "prose" in kinds and not {"dialogue", "question"} & kinds


def test_texts_are_running_text(home, llama):
    """Nothing of a text's begin and end but a conversation's own template, and the words that it went on from."""
    openings = yaml.safe_load(module.OPENINGS.read_text())
    special = set(llama.tokenizer.all_special_ids)
    text = written(llama, 6000)
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
    assert OwnText(llama.tokenizer, text.lines[:1]).windows(100, 64).ids.shape[0] == len(text.lines[0]["ids"]) // 64


def test_openings():
    """Of many kinds, none twice, and none that ends in the middle of a token's blank."""
    openings = yaml.safe_load(module.OPENINGS.read_text())
    every = [text for texts in openings.values() for text in texts]
    assert len(openings) >= 8 and len(set(every)) == len(every) >= 150
    assert all(text == text.rstrip() for text in every)


def test_what_a_loop_is():
    assert distinct_share([1, 2, 3]) is None
    assert distinct_share([1, 2, 3, 4, 1, 2, 3, 4]) == 4 / 5
    varied = list(range(300))
    assert loop(varied, "words") == ""
    assert loop(varied + [1, 2] * 60, "words") == "few distinct runs of tokens"
    # Also where it goes on as text afterwards.
    assert loop([*varied, *[7] * 200, *range(300, 500)], "words") == "few distinct runs of tokens"
    listed = "\n".join(f"{n}. a step of it" for n in range(20))
    assert loop(varied, listed) == ""
    assert loop(varied, "The same.\n" * 12 + listed[:40]) == "repeated lines"
    # Rulers and blank lines of tables are none.
    assert loop(varied, "---\n\n" * 20 + "| a |\n| b |") == ""
