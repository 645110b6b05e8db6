"""What a run may compare beside models: another checkout, formats of cached rows, ways of drafting on conversations;
its short table. Tiny models; no assertion depends on timing."""

import json
from pathlib import Path

import pytest

import mlaforge
from mlaforge.bench import recipe
from mlaforge.bench.config import BenchConfig
from mlaforge.bench.prompts import Conversations
from mlaforge.bench.results import read_table
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.config import resolve
from mlaforge.runtime import UserError
from support.eagle3_heads import saved

CHECKOUT = Path(mlaforge.__file__).parents[2]
SHORT = ["--context", "48", "--tokens", "8", "--rounds", "2", "--warm-up", "0", "--device", "cpu", "--dtype", "float32",
         "--cache-fraction", "0.001", "--transformers", "none"]  # fmt: skip
pytestmark = pytest.mark.usefixtures("known_roof")


@pytest.fixture
def bench(cli, evaluation_file, tmp_path):
    """bench(WHAT, MODEL, ..., fails=False) -> the results of WHAT, or stderr."""

    def run(what, *words, fails=False):
        done = cli("bench", what, *SHORT, "--text", evaluation_file, "--out", tmp_path / "runs", *words)
        assert done.exit_code == 2 * fails, done.stderr
        if fails:
            return done.stderr
        return json.loads((Path(done.stdout.splitlines()[-1]) / f"{what}.json").read_text())

    return run


@pytest.fixture
def questions(tmp_path):
    (path := tmp_path / "questions.jsonl").write_text(
        "".join(json.dumps({"turns": [text, "x"]}) + "\n" for text in ("abcd", "abcabcabc", "ee", "ba"))
    )
    return path


def test_another_checkout_is_timed_in_the_same_rounds(bench, tiny_models, tmp_path):
    """Here this one: its engine, in a process of its own, gives the same tokens."""
    table = tmp_path / "tables.json"
    words = ("--base", CHECKOUT, "--summary", table, "--table", "of two")
    body = bench("speed", tiny_models["llama"], *words)
    today, base = body["cases"]
    assert (today["engine"], base["engine"]) == ("mlaforge", "base") and len(body["base"]) >= 7
    assert today["output_sha256"] == base["output_sha256"] and base["repetitions"] == 2
    rates = [case["tokens_per_second"]["runs"] for case in (today, base)]
    assert today["over_base"]["runs"] == [a / b for a, b in zip(*rates, strict=True)]
    assert today["over_base"]["mean"] == pytest.approx(sum(today["over_base"]["runs"]) / 2)
    assert base["over_base"] is None and base["time_to_first_token"]["median"] > 0
    short = read_table(table, "of two")
    assert short["base"] == body["base"] and [row["peer"] for row in short["rows"]] == [
        body["models"][0]["name"],
        "base",
    ]
    assert {"median", "min", "max", "mean"} <= short["rows"][0]["over_base"].keys()
    assert "runs" not in json.dumps(short["rows"]) and len(table.read_text().splitlines()) < 25


def test_a_folder_without_mlaforge_is_no_base(bench, tiny_models, tmp_path):
    assert "src/mlaforge is missing" in bench("speed", tiny_models["llama"], "--base", tmp_path, fails=True)


def test_a_base_that_fails_is_recorded(bench, tiny_models, tmp_path):
    """The run goes on without it."""
    package = tmp_path / "old" / "src" / "mlaforge" / "engine"
    package.mkdir(parents=True)
    for name in ("__init__.py", "engine/__init__.py"):
        (package.parent / name).touch()
    (package / "llm.py").write_text("raise RuntimeError('too old')\n")
    (tmp_path / "old" / ".git").write_text(f"gitdir: {CHECKOUT / '.git'}\n")
    if not (CHECKOUT / ".git").is_dir():
        (tmp_path / "old" / ".git").write_text((CHECKOUT / ".git").read_text())
    today, base = bench("speed", tiny_models["llama"], "--base", tmp_path / "old")["cases"]
    assert today["status"] == "ok" and base["status"] == "failed" and "too old" in base["limit"]["what"]


def test_formats_of_rows_are_cases(bench, tiny_models, converted, tmp_path):
    """Bytes and roofline are those of the format; coded rows stay; what a model cannot have is recorded."""
    models = (tiny_models["llama"], converted("llama", "latent_rope"))
    table = tmp_path / "tables.json"
    body = bench("speed", *models, "--kv-cache-dtype", "auto,int8,int4", "--context", "64", "--summary", table)
    cases = {(case["layout"], case["kv_cache_dtype"]): case for case in body["cases"]}
    assert len(cases) == len({case["id"] for case in body["cases"]}) == 6
    plain, int8 = cases["gqa", "auto"], cases["gqa", "int8"]
    assert int8["cache"]["bytes"] < plain["cache"]["bytes"] / 2
    assert int8["cache"]["planned_bytes"] < plain["cache"]["planned_bytes"] / 2
    refused = cases["latent_rope", "int4"]
    assert refused["status"] == "failed" and "int4" in refused["limit"]["what"]
    rows = {row["peer"]: row for row in read_table(table, "speed")["rows"]}
    name = body["models"][0]["name"]
    assert rows[f"{name}, int8 rows"]["cache_bytes"] == int8["cache"]["bytes"] and name in rows
    assert rows[f"{body['models'][1]['name']}, int4 rows"]["status"] == "failed"


def test_ways_of_drafting_on_conversations(bench, tiny_models, questions, tmp_path):
    """A head alone, in a tree, and as the engine does by default, beside prompt lookup and plain decoding."""
    head = saved(tmp_path / "head")
    words = ("--prompts", questions, "--draft", f"ngram,{head},tree,default", "--num-speculative-tokens", "0,2,3")
    body = bench("draft", tiny_models["llama"], *words, "--context", "0", "--rounds", "3")
    cases = {(case["draft"], case["num_speculative_tokens"]): case for case in body["cases"]}
    ways = {(draft, k) for draft in ("ngram", "head", "tree") for k in (2, 3)} | {("none", 0), ("default", 3)}
    assert cases.keys() == ways and body["prompts"][0]["path"] == "questions.jsonl"
    # In fp32 all answers are plain decoding's: three prompts of one request each.
    assert {case["answers"] for case in cases.values()} == {3}
    assert {case["answers_unlike_plain"] for way, case in cases.items() if way[1]} == {0}
    blocks = {way: case["eagle_speculation"] for way, case in cases.items()}
    assert blocks["tree", 3]["tree_tokens"] > 0 == blocks["head", 3]["tree_tokens"]
    # Of all repetitions, not of the last alone: 8 tokens after the first of each.
    assert all(block["total_accepted_tokens"] == 3 * 8 for way, block in blocks.items() if way[1])


def test_conversations_follow_different_passages(tiny_models, questions, tmp_path):
    tokenizer = SourceModel.open(tiny_models["llama"]).tokenizer
    (text := tmp_path / "text.txt").write_text("abcde" * 4)
    conversations = Conversations(str(questions), (str(text),), tokenizer)

    def turns(prompts):
        return [[tokenizer.decode(ids) for ids in batch] for batch in prompts]

    (first, second), (third, fourth) = turns(conversations(4, 2, 2))
    assert "abcd\n\nabcd" in first and "eabc\n\nabcabcabc" in second and "deab\n\nee" in third and "\n\nba" in fourth
    assert [batch[0] for batch in turns(conversations(0, 1, 4))] == [
        prompt.replace(passage, "") for prompt, passage in
        zip((first, second, third, fourth), ("abcd\n\n", "eabc\n\n", "deab\n\n", "cdea\n\n"), strict=True)
    ]  # fmt: skip
    with pytest.raises(UserError, match="4 prompts, 6 are needed"):
        conversations(0, 2, 3)
    with pytest.raises(UserError, match="20 tokens, 3 passages of 9 are needed"):
        conversations(9, 1, 3)


def test_contradicting_options_are_refused(questions):
    def read(**options):
        return recipe.read("draft", "cpu", resolve(BenchConfig, None, **options))

    assert read(prompts=str(questions)).contexts == (0,) and read().contexts == (256,)
    with pytest.raises(UserError, match="context 0 must be at least 2, except with --prompts"):
        read(context="0")
    with pytest.raises(UserError, match="equal lengths"):
        read(prompts=str(questions), batch="2")
    with pytest.raises(UserError, match="draft tree needs a head"):
        read(draft="tree")


def test_a_table_needs_a_file(bench, tiny_models):
    assert "--table names" in bench("speed", tiny_models["llama"], "--table", "x", fails=True)
