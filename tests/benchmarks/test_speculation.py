"""The benchmark of speculation: what it refuses, and that its table is what its runs were."""

import argparse
import functools
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from mlaforge.artifact import Manifest
from mlaforge.engine.llm import LLM
from mlaforge.runtime import UserError
from support.eagle3_heads import saved
from support.tiny_models import save_model

FOLDER = Path(__file__).parents[2] / "benchmarks"


def script(name, known_as):
    spec = importlib.util.spec_from_file_location(known_as, FOLDER / f"{name}.py")
    sys.modules[known_as] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# By these names they read one another.
rows, bench = script("rows", "rows"), script("speculation", "speculation")
acceptance = script("acceptance", "bench_acceptance")


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A tiny model to which only the letters a to e are text."""
    directory = save_model(tmp_path_factory.mktemp("reader"), "llama", 0)
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    letters = LLM(directory, dtype="float32", device="cpu", cache_bytes=1 << 20).tokenizer("abcde")["input_ids"]
    # Its stream is one direction, which the head's rows of these letters lie along.
    tensors["model.embed_tokens.weight"][:] = 0.1 * torch.randn(260, 64) + 1
    tensors["lm_head.weight"][:] = -0.1
    tensors["lm_head.weight"][letters] = 0.2
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(0.01)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_random_tokens_are_refused(reader, tmp_path):
    llm = LLM(reader, dtype="float32", device="cpu", cache_bytes=1 << 20)
    bench.refuse_random(llm, [llm.tokenizer("abcdeabedcba")["input_ids"]])
    with pytest.raises(UserError, match=r"prompt 1 costs .* random tokens"):
        bench.refuse_random(llm, [llm.tokenizer("abcde")["input_ids"], torch.randint(0, 250, (40,)).tolist()])
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"turns": ["abcd", "x"]}) + "\n")
    # The template around it is not what is judged.
    (prompt,) = bench.read_prompts(path, llm, 80)
    assert prompt == llm.chat_prompt([{"role": "user", "content": "abcd"}])
    path.write_text(json.dumps({"turns": [[1, 2, 3]]}) + "\n")
    with pytest.raises(UserError, match="line 1 is not"):
        bench.read_prompts(path, llm, 80)


def test_a_head_that_may_know_the_prompts_is_refused(tmp_path, monkeypatch):
    (tmp_path / "prompts").mkdir()
    path = tmp_path / "prompts" / "mt_bench.jsonl"
    path.write_text(json.dumps({"turns": ["abcd"]}) + "\n")
    head = saved(tmp_path / "head")
    Manifest("draft train", {}, {"text": [{"exclude": ["of other prompts"]}], "init": None}).save(head)
    # It sets torch's threads for all that comes after.
    threads = str(torch.get_num_threads())
    monkeypatch.setattr(
        sys, "argv", ["speculation.py", "--data", str(tmp_path), "--draft", str(head), "--threads", threads]
    )
    with pytest.raises(UserError, match=r"need not be free of .*mt_bench\.jsonl"):
        bench.main()


def test_the_table(tiny_models):
    options = argparse.Namespace(model=tiny_models["llama"], dtype="float32", draft=None, count=3, tree=0, end=False)
    modes = bench.Modes(options)
    rows = bench.measure(modes, [[1, 2, 3, 4] * 8, [7, 8, 9] * 5], 30)
    assert set(rows) == {"plain", "ngram", "ngram copies adaptive", "perfect"}
    perfect, plain = rows["perfect"], rows["plain"]
    block = perfect["eagle_speculation"]
    # 29 tokens after the first: seven steps of four, and one of one, which has room for no draft.
    assert (block["steps"], block["total_accepted_tokens"], block["mean_acceptance_rate"]) == (16, 58, 1)
    assert plain["ratio"]["runs"] == [1, 1] and "eagle_speculation" not in plain
    assert all(row["differ"] == 0 and len(row["tokens_per_second"]["runs"]) == 2 for row in rows.values())
    # The same tokens from all of them.
    assert 0 < plain["distinct_4_grams"] <= 1 and len({row["distinct_4_grams"] for row in rows.values()}) == 1
    lines = bench.table(rows).splitlines()
    assert len(lines) == 5 and lines[-1].startswith("perfect") and lines[-1].endswith("3.62    1.00 1.00 1.00")


def test_a_heads_rows(tiny_models, tmp_path):
    """A chain's and a tree's, each with counters of its own."""
    folder = saved(tmp_path / "head")
    options = argparse.Namespace(model=tiny_models["llama"], dtype="float32", draft=folder, count=2, tree=6, end=False)
    rows = bench.measure(bench.Modes(options), [[1, 2, 3, 4] * 4], 12)
    blocks = {name: row["eagle_speculation"] for name, row in rows.items() if name.startswith("head")}
    assert set(blocks) == {"head", "head adaptive", "head copies adaptive", "head tree", "head copies tree adaptive"}
    assert blocks["head"]["tree_tokens"] == 0 < blocks["head tree"]["tree_tokens"]


def test_acceptance(reader, tmp_path):
    """Every answer of every prompt is counted, past its end."""
    path = tmp_path / "mt_bench.jsonl"
    path.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in ("abcd", "abcabcabc", "ee", "ba")))
    options = argparse.Namespace(data=tmp_path, dtype="float32", prompts=3, tokens=12, context=0)
    rows = {
        name: acceptance.count(options, reader, path, drafter)
        for name, drafter in (("head", str(saved(tmp_path / "head"))), ("ngram", "ngram"))
    }
    for row in rows.values():
        block = row["eagle_speculation"]
        assert (row["prompts"], block["total_accepted_tokens"], block["num_speculative_tokens"]) == (3, 3 * 11, 3)
        assert 0 < row["distinct_4_grams"] < 1
    # The model says one letter for ever, which prompt lookup finds.
    assert rows["ngram"]["eagle_speculation"]["mean_acceptance_length"] > 2
    assert rows["head"]["eagle_speculation"]["drafted"] > 0
    lines = acceptance.table(rows).splitlines()
    assert len(lines) == 3 and lines[2].startswith("ngram")


def test_questions_follow_different_passages(reader, tmp_path):
    (tmp_path / "wikitext-2").mkdir()
    (tmp_path / "wikitext-2" / "wiki.test.raw").write_text("abcde" * 4)
    (tmp_path / "mt_bench.jsonl").write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in ("abc", "ee")))
    llm = LLM(reader, dtype="float32", device="cpu", cache_bytes=1 << 20)
    before = functools.partial(acceptance.passages, llm, tmp_path, 3)
    assert before(2) == ["abc\n\n", "dea\n\n"]
    with pytest.raises(UserError, match="exceed the text of 20"):
        before(7)
    prompts = bench.read_prompts(tmp_path / "mt_bench.jsonl", llm, 2, before)
    texts = ["abc\n\nabc", "dea\n\nee"]
    assert prompts == [llm.chat_prompt([{"role": "user", "content": text}]) for text in texts]
    assert prompts != bench.read_prompts(tmp_path / "mt_bench.jsonl", llm, 2)
