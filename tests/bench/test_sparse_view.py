"""Scenarios with partial verification: rows with it and without beside each other, their ceiling, and its gates.
Nothing about seconds."""

import dataclasses
import functools
import json

import pytest
import torch
from safetensors.torch import load_file

from mlaforge.bench import gate, recipe, roof, scenario, summary
from mlaforge.bench.config import BenchConfig
from mlaforge.bench.engine_peer import EnginePeer
from mlaforge.bench.invariants import Audit
from mlaforge.bench.peer import Variant
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.config import resolve
from mlaforge.engine.cache.block_pool import BlockPool
from mlaforge.engine.cache.block_tables import BlockTables
from mlaforge.engine.config import EngineConfig
from mlaforge.engine.engine import Engine
from mlaforge.engine.speculation.sparse_view import SparseViewConfig
from mlaforge.ops.native import kernels
from mlaforge.planning.costs import Gpu
from mlaforge.planning.plan import plan_of

pytestmark = pytest.mark.usefixtures("known_roof")
compiled = pytest.mark.skipif(kernels() is None, reason="no kernel reads a part of the cache")

VIEW = {
    "specpv_sink": 16, "specpv_retrieval": 32, "specpv_window": 32, "specpv_full_every": 3, "specpv_max_pending": 8,
}  # fmt: skip
SHORT = ["--context", "100,256", "--tokens", "20", "--rounds", "2", "--warm-up", "0", "--device", "cpu", "--scope",
         "cpu", "--cache-fraction", "0.001", "--dtype", "bfloat16"]  # fmt: skip


@pytest.fixture
def small_view(monkeypatch):
    """Engines of scenarios whose views are small enough for a tiny model's context."""
    monkeypatch.setattr(scenario, "EngineConfig", functools.partial(EngineConfig, **VIEW))


@pytest.fixture
def bench(cli, evaluation_file, tmp_path, small_view):
    """bench(WHAT, MODEL, ..., code=0) -> the command's result, and the body of WHAT's results."""

    def run(what, *words, code=0):
        done = cli("bench", what, *SHORT, "--text", evaluation_file, "--out", tmp_path, *words)
        assert done.exit_code == code, (done.stdout, done.stderr)
        return done, json.loads(max(tmp_path.glob(f"*/{what}.json")).read_text())

    return run


def own(body, **wanted):
    cases = [case for case in body["cases"] if case["engine"] == "mlaforge"]
    return [case for case in cases if all(case[key] == value for key, value in wanted.items())]


@compiled
def test_rows_with_and_without_it_stand_beside_each_other(bench, tiny_models):
    done, body = bench("large-context", tiny_models["llama"], "--perf")
    assert [(c["num_speculative_tokens"], c["specpv"]) for c in own(body, context=256)] == [
        (0, "off"), (3, "off"), (3, "lossless"),
    ]  # fmt: skip
    plain, full, partial = own(body, context=256)
    # The tokens are plain decoding's, whatever judged them first.
    assert plain["output_sha256"] == full["output_sha256"] == partial["output_sha256"]
    runs = [case["tokens_per_second"]["runs"] for case in (partial, full)]
    assert partial["over_full_verification"]["runs"] == [a / b for a, b in zip(*runs, strict=True)]
    assert full["over_full_verification"] is None and plain["over_full_verification"] is None
    block = partial["eagle_speculation"]
    assert 0 < block["partial_steps"] <= block["pending_tokens"] <= 4 * block["partial_steps"]
    assert 0 < block["kept_share"] <= 1 and full["eagle_speculation"]["kept_share"] is None
    assert len({case["id"] for case in body["cases"]}) == len(body["cases"])
    # Texts shorter than twice the view have no rows of their own: they would be judged by all of the cache.
    assert [(c["num_speculative_tokens"], c["specpv"]) for c in own(body, context=100)] == [(0, "off"), (3, "off")]
    assert "no partial verification of llama at 100 tokens: a view takes texts of 160 tokens or more" in done.stderr
    assert f"{block['kept_share']:.0%} kept" in done.stdout and "3 replay specpv" in done.stdout
    assert {f["name"]: (f["passed"], f["cases"]) for f in body["perf"]} == {
        "tuned_kernels": (True, 5), "cache_integrity": (True, 5), "no_host_reads": (True, 5),
        "no_debug_copies": (True, 5), "deterministic": (True, 5), "drafting_goes_on": (True, 3),
    }  # fmt: skip


def test_what_it_means_nothing_for_is_left_out(bench, tiny_models, small_view):
    done, body = bench("large-context", tiny_models["llama"], "--num-speculative-tokens", "0")
    assert {case["specpv"] for case in own(body)} == {"off"} and "no partial verification" not in done.stderr
    done, body = bench("large-context", tiny_models["llama"], "--dtype", "float32")
    assert {case["specpv"] for case in own(body)} == {"off"}
    assert "llama at 256 tokens: in float32 no kernel of this machine reads a part" in done.stderr


def test_stress_holds_every_number_of_drafts_and_both_caches():
    whole = recipe.read("stress", "full", BenchConfig())
    assert (whole.contexts, whole.counts) == ((16384, 32768, 65536), (0, 2, 3, 4, 5))
    for scope in ("full", *recipe.SCOPES):
        made = recipe.read("stress", scope, BenchConfig())
        assert (made.counts, made.cache_fractions) == ((0, 2, 3, 4, 5), (0.75, 0.9))
        assert (made.specpvs, made.transformers, made.prompts_once) == (("off", "lossless"), ("none",), True)
    for scope in recipe.SCOPES:
        short = recipe.read("large-context", scope, BenchConfig())
        assert (short.counts, short.specpvs) == ((0, 3), ("off", "lossless"))
        assert len(short.cache_fractions) == len(short.contexts) == 1
    for name in ("stress", "large-context"):
        for scope in recipe.SCOPES:
            short = recipe.read(name, scope, BenchConfig())
            # Twice a view as it is shipped, or there would be nothing to see.
            assert min(short.contexts) >= SparseViewConfig.from_options(EngineConfig()).min_length
    assert recipe.read("single", "full", BenchConfig()).specpvs == ("off",)


@compiled
def test_stress_beyond_the_cache_is_capacity(bench, tiny_models, monkeypatch):
    """Row by row; the others go on."""
    monkeypatch.setattr("mlaforge.engine.memory.free_bytes", lambda device: 1 << 30)
    # Room for two requests of 12 blocks, each of 16 tokens of 192 numbers in bf16.
    fraction = 1.01 * 2 * 12 * 16 * 192 * 2 / 2**30
    words = ("--context", "160", "--batch", "1,3", "--cache-fraction", fraction)
    done, body = bench("stress", tiny_models["llama"], *words)
    one, three = own(body, batch=1), own(body, batch=3)
    assert [case["status"] for case in one] == 9 * ["ok"] and [case["status"] for case in three] == 9 * ["capacity"]
    # What would have fitted: two requests of 12 blocks.
    assert {case["limit"]["tokens"] for case in three} == {2 * 12 * 16}
    assert all("the cache holds 384 tokens" in case["limit"]["what"] for case in three)
    assert "capacity: the cache holds 384 tokens" in done.stdout


@compiled
def test_stress_goes_through_every_length_number_and_cache(bench, tiny_models, monkeypatch):
    """On a model with windows, YaRN, experts and sinks: every case of the grid runs, partial steps in all that draft,
    tokens are plain decoding's, and each prompt is computed once, the longer one's beginning with the shorter."""
    computed, decode = [], EnginePeer.decode

    def counting(self, prompts, tokens):
        before = dataclasses.replace(self.engine.stats())
        made = decode(self, prompts, tokens)
        after = self.engine.stats()
        found = after.cached_prompt_tokens - before.cached_prompt_tokens
        computed.append(after.prompt_tokens - before.prompt_tokens - found)
        return made

    monkeypatch.setattr(EnginePeer, "decode", counting)
    words = ("--context", "160,256", "--rounds", "1", "--cache-fraction", "0.0005,0.001", "--draft", "ngram")
    _, body = bench("stress", tiny_models["gpt_oss"], *words)
    assert {case["engine"] for case in body["cases"]} == {"mlaforge"} and body["config"]["prompts_once"]
    for fraction in (0.0005, 0.001):
        for context in (160, 256):
            made = own(body, context=context, cache_fraction=fraction)
            assert [(c["num_speculative_tokens"], c["specpv"]) for c in made] == [
                (0, "off"), *((k, way) for k in (2, 3, 4, 5) for way in ("off", "lossless")),
            ]  # fmt: skip
            assert {case["status"] for case in made} == {"ok"} and len({c["output_sha256"] for c in made}) == 1
            assert all(c["eagle_speculation"]["partial_steps"] for c in made if c["specpv"] == "lossless")
            # Whoever found a prompt says nothing of how long it takes.
            assert [c["time_to_first_token"] for c in made[1:]] == 8 * [None]
    firsts = [case for case in own(body) if case["time_to_first_token"]]
    assert len(firsts) == 2 and {case["context"] for case in firsts} == {160}
    # Once per cache; whole blocks are found, and at least the last token is computed anew.
    assert [tokens for tokens in computed if tokens > 16] == [160, 256 - 160] * 2 and len(computed) == 2 * 2 * 2 * 9


@compiled
@pytest.mark.parametrize("where", ["decoding", "the audit"])
def test_memory_that_ends_is_capacity_wherever_it_ends(bench, tiny_models, monkeypatch, where):
    step, run = Engine.step, Audit.run

    def full(self):
        if self.speculation is not None and self.speculation.stats.sparse_steps:
            raise RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`")
        return step(self)

    def audited(self, prompts, tokens, variant):
        if variant.specpv != "off":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return run(self, prompts, tokens, variant)

    if where == "decoding":
        monkeypatch.setattr(Engine, "step", full)
    else:
        monkeypatch.setattr(Audit, "run", audited)
    _, body = bench("large-context", tiny_models["llama"], "--perf", "--context", "256")
    assert [case["status"] for case in own(body)] == ["ok", "ok", "capacity"]
    limit = own(body)[-1]["limit"]
    assert "out of memory" in limit["what"] and "\n" not in limit["what"] and "--cache-fraction" in limit["change"]
    assert all(found["passed"] for found in body["perf"])


@pytest.mark.parametrize(("owner", "name", "words"), [
    (BlockTables, "free", "are in the cache"), (Engine, "abort", "requests are left"),
    (BlockPool, "release", "holders, but 0 hold it"),
])  # fmt: skip
def test_what_a_case_leaves_behind_ends_the_run(bench, tiny_models, monkeypatch, owner, name, words):
    if owner is Engine:
        # A step that runs out of memory leaves its requests to whoever aborts them.
        monkeypatch.setattr(Engine, "step", lambda self: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
    monkeypatch.setattr(owner, name, lambda self, *ignored: None)
    done, _ = bench("large-context", tiny_models["llama"], "--num-speculative-tokens", "0", code=1)
    assert "an invariant is broken: cache_integrity" in done.stderr and words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def peer(tiny_models):
    config = resolve(
        EngineConfig, None, dtype="bfloat16", device="cpu", cache_bytes=4 << 20, num_speculative_tokens=3, **VIEW
    )
    made = EnginePeer(tiny_models["llama"], "llama", None, config, 300, 2)
    yield made
    made.close()


@compiled
def test_it_is_audited(peer, monkeypatch):
    """The invariants hold; a draft that is shorter than the partial steps is seen."""
    prompts = [list(range(3, 203)), list(range(203, 3, -1))]
    peer.run(prompts, 12, Variant())
    findings = Audit(peer).run(prompts, 12, Variant(3, "replay", "lossless"))
    assert [finding.name for finding in findings if not finding.passed] == []
    assert peer.engine.speculation.stats.sparse_steps > 0
    # Both take turns on one engine.
    peer.use(Variant(3, "replay"), [[], []], prompts)
    assert peer.engine.speculation.sparse_view is None
    propose = peer.engine.speculation.__class__.propose

    def shorter(self, decision, chunks):
        made = propose(self, decision, chunks)
        drafts = {s: dataclasses.replace(draft, token_ids=draft.token_ids[:1]) for s, draft in made.drafts.items()}
        chunks = [(s, min(upto, len(s.token_ids) + len(drafts[s].token_ids) if s in drafts else upto))
                  for s, upto in made.chunks]  # fmt: skip
        return dataclasses.replace(made, drafts=drafts, chunks=chunks)

    monkeypatch.setattr(peer.engine.speculation.__class__, "propose", shorter)
    findings = Audit(peer).run(prompts, 12, Variant(3, "replay", "lossless"))
    assert [finding.name for finding in findings if not finding.passed] == ["drafting_goes_on"]


VIEWED = SparseViewConfig(sink=16, retrieval=32, window=32, full_every=8, max_provisional=8)


def blocked(steps, partial, pending, length):
    return {"steps": steps, "partial_steps": partial, "pending_tokens": pending, "mean_acceptance_length": length}


def test_the_ceiling_is_bytes_and_flops_of_partial_steps_and_full_ones(tiny_models):
    """Where memory is the limit, against the checkpoint's own tensors."""
    source = SourceModel.open(str(tiny_models["llama"]))
    plan, slow = plan_of(source.config, source.spec), Gpu("cpu", 1e3, 0.05, 8.0, "made up", achievable=1.0)
    tensors = load_file(tiny_models["llama"] / "model.safetensors")
    weights = sum(4 * t.numel() for name, t in tensors.items() if t.ndim == 2 and "embed_tokens" not in name)
    row, context = 192 * 4, 20_000
    partial, full = weights + VIEWED.num_tokens * row, weights + context * row
    # 10 full steps, 25 partial ones that agreed to 60 tokens, 30 of which were kept.
    top = roof.partial_limit(plan, slow, "float32", context, 1, 3, VIEWED, "float32", blocked(10, 25, 60, 4.0))
    seconds = (full + 2.5 * partial) / slow.bandwidth
    assert top["tokens_per_second"] == pytest.approx(4 / seconds, rel=1e-2)
    assert top["limit"] == "cache bandwidth"
    # All 6 of a turn kept, over 2.4 tokens of a step that reads everything.
    assert top["specpv_ceiling"] == pytest.approx(7 / seconds / (2.4 / (full / slow.bandwidth)), rel=1e-2)
    # Every draft accepted: two partial steps agree to eight tokens.
    assert top["speedup_ceiling"] == pytest.approx(9 * full / (full + 2 * partial), rel=1e-2)
    # Where a step reads little of the cache, there is nothing to gain.
    short = roof.partial_limit(plan, slow, "float32", 160, 1, 3, VIEWED, "float32", blocked(10, 20, 80, 9.0))
    assert short["specpv_ceiling"] < 1 < roof.limit(plan, slow, "float32", 160, 1, 3, 4.0)["speedup_ceiling"]


def test_no_turn_is_faster_than_its_ceiling(tiny_models):
    """Uneven steps, where FLOPs are the limit too: their mean is no slower."""
    source = SourceModel.open(str(tiny_models["llama"]))
    plan = plan_of(source.config, source.spec)
    for flops in (1e-4, 1e-2, 1e3):
        gpu = Gpu("cpu", flops, 0.05, 8.0, "made up", achievable=1.0)

        def seconds(context, queries, gpu=gpu):
            return roof.step_seconds(plan, gpu, "float32", context, 1, queries)[0]

        for turns in ([(6, 2)], [(4, 4), (1, 1, 1)], [(1,) * 8, (4, 4), (6, 2)]):
            partial, pending = sum(map(len, turns)), sum(map(sum, turns))
            took = sum(seconds(VIEWED.num_tokens, rows) for turn in turns for rows in turn)
            took += sum(seconds(4000, 1 + sum(turn)) for turn in turns)
            block = blocked(len(turns), partial, pending, 1 + pending / len(turns))
            top = roof.partial_limit(plan, gpu, "float32", 4000, 1, 5, VIEWED, "float32", block)
            assert top["tokens_per_second"] * (1 + 1e-9) >= (len(turns) + pending) / took


def test_the_gate_of_partial_verification():
    """Shipped, for a GPU and for the twins: it passes near the other row, fails below, and knows its ceiling."""
    shipped = {scope: [g for path in gate.FOLDER.glob("*.yaml") for g in gate.read(path)
                       if scope in g.scopes and g.needs == "specpv"] for scope in gate.SCOPES}  # fmt: skip
    for scope, gates in shipped.items():
        assert [(g.scenario, g.quantity, g.threshold) for g in gates] == [
            ("large-context", "tokens_per_second", 0.97), ("large-context", "roof_fraction", 1),
        ]  # fmt: skip
        assert gates[0].over == {"specpv": "off"} and gates[0].case["specpv"] == "lossless"
        assert (gates[0].case.get("context"), gates[0].case.get("batch")) == (
            (None, None) if scope == "cpu" else (32768, 1)
        )
    speed, share = shipped["full"]

    def case(specpv, runs, ceiling=None, fraction=0.5, cache=0.75, **changes):
        return {
            "id": f"{specpv} {cache}", "engine": "mlaforge", "model": "m", "dtype": "bfloat16", "context": 32768,
            "batch": 1, "num_speculative_tokens": 3, "draft": "head", "specpv": specpv, "layout": "gqa",
            "cache_fraction": cache, "imported": None, "status": "ok", "limit": None,
            "tokens_per_second": summary.spread(runs), "eagle_speculation": {"num_speculative_tokens": 3},
            "roofline": {"tokens_per_second": 400.0, "fraction": fraction, "limit": "cache", "speedup_ceiling": 5.0,
                         "specpv_ceiling": ceiling}, **changes,
        }  # fmt: skip

    def judged(wanted, *cases):
        body = {"scenario": "large-context", "cases": list(cases), "roof": {"name": "h200"}, "perf": None}
        return gate.judge(wanted, {"large-context": body})

    off = case("off", [100.0, 100.0])
    found = judged(speed, off, case("lossless", [97.0, 99.0], 1.6))
    assert (found["verdict"], found["ceiling"], found["against"]) == ("pass", 1.6, "full verification")
    assert found["value"] == pytest.approx(0.98) and "every pending token kept" in found["ceiling_told"]
    assert judged(speed, off, case("lossless", [90.0, 92.0], 1.6))["verdict"] == "fail"
    # No drafter could.
    assert judged(speed, off, case("lossless", [80.0, 80.0], 0.9))["verdict"] == "unreachable"
    # Of two caches each is beside its own.
    other = [case("off", [10.0, 10.0], cache=0.9), case("lossless", [5.0, 5.0], 1.6, cache=0.9)]
    found = judged(speed, off, case("lossless", [120.0, 120.0], 1.6), *other)
    assert (found["verdict"], found["value"], found["case"]) == ("fail", 0.5, "lossless 0.9")
    # Faster than the machine: the measurement is wrong.
    assert judged(share, off, case("lossless", [1.0], fraction=1.02))["verdict"] == "fail"
    assert judged(share, off, case("lossless", [1.0], fraction=0.9))["verdict"] == "pass"
    # Without it, and where prompt lookup drafts, nobody asked.
    for rows in ([off], [off, case("lossless", [50.0], draft="ngram")]):
        found = judged(speed, *rows)
        assert found["verdict"] == "not asked" and "--specpv" in found["told"]
    lacking = case("lossless", [1.0], status="capacity", limit={"what": "no room", "change": "less"})
    found = judged(speed, off, lacking)
    assert found["verdict"] == "missing" and "no room" in found["told"]
    # Results from before there was any of it.
    old = {key: value for key, value in off.items() if key not in ("specpv", "cache_fraction")}
    assert judged(speed, old)["verdict"] == "not asked"
    length = gate.Gate("l", ("full",), "large-context", "mean_acceptance_length", 2.0, None, {}, None, "large-context")
    block = {"mean_acceptance_length": 6.5, "num_speculative_tokens": 8}
    assert judged(length, case("lossless", [1.0], eagle_speculation=block))["ceiling"] == 9.0
