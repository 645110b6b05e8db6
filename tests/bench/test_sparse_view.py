"""Scenarios with partial verification: rows with and without it, their ceiling, and its gates. No assertion depends
on timing."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file

from mlaforge.bench import gate, recipe, roof, summary
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

VIEW = SparseViewConfig(sink=16, retrieval=32, window=32, full_every=3, max_provisional=8)
SHORT = ["--context", "100,256", "--tokens", "20", "--rounds", "2", "--warm-up", "0", "--device", "cpu", "--scope",
         "cpu", "--cache-fraction", "0.001", "--dtype", "bfloat16"]  # fmt: skip


@pytest.fixture
def small_view(monkeypatch):
    """Make scenarios use views that fit a tiny model's context."""
    monkeypatch.setattr(SparseViewConfig, "from_options", lambda *ignored: VIEW)


@pytest.fixture
def bench(cli, evaluation_file, tmp_path, small_view):
    """bench(WHAT, MODEL, ..., code=0) -> the command's result, and the body of WHAT's results."""

    def run(what, *words, code=0):
        done = cli("bench", what, *SHORT, "--text", evaluation_file, "--out", tmp_path, *words)
        assert done.exit_code == code, (done.stdout, done.stderr)
        return done, json.loads(max(tmp_path.glob(f"*/{what}.json")).read_text())

    return run


def engine_cases(body, **fields):
    cases = [case for case in body["cases"] if case["engine"] == "mlaforge"]
    return [case for case in cases if all(case[key] == value for key, value in fields.items())]


@compiled
def test_rows_with_and_without_partial_verification(bench, tiny_models):
    done, body = bench("large-context", tiny_models["llama"], "--perf")
    assert [(c["num_speculative_tokens"], c["specpv"]) for c in engine_cases(body, context=256)] == [
        (0, "off"), (3, "off"), (3, "lossless"),
    ]  # fmt: skip
    plain, full, partial = engine_cases(body, context=256)
    # Partial verification does not change the tokens.
    assert plain["output_sha256"] == full["output_sha256"] == partial["output_sha256"]
    runs = [case["tokens_per_second"]["runs"] for case in (partial, full)]
    assert partial["over_full_verification"]["runs"] == [a / b for a, b in zip(*runs, strict=True)]
    assert full["over_full_verification"] is None and plain["over_full_verification"] is None
    block = partial["eagle_speculation"]
    assert 0 < block["partial_steps"] <= block["pending_tokens"] <= 4 * block["partial_steps"]
    assert 0 < block["kept_share"] <= 1 and full["eagle_speculation"]["kept_share"] is None
    assert len({case["id"] for case in body["cases"]}) == len(body["cases"])
    # Texts shorter than twice the view have no rows with partial verification, which would read the full cache.
    assert [(c["num_speculative_tokens"], c["specpv"]) for c in engine_cases(body, context=100)] == [
        (0, "off"),
        (3, "off"),
    ]
    assert "no partial verification of llama at 100 tokens: a view needs at least 160 tokens" in done.stderr
    assert f"{block['kept_share']:.0%} kept" in done.stdout and "3 replay specpv" in done.stdout
    assert {f["name"]: (f["passed"], f["cases"]) for f in body["perf"]} == {
        "tuned_kernels": (True, 5), "cache_integrity": (True, 5), "no_host_reads": (True, 5),
        "no_debug_copies": (True, 5), "deterministic": (True, 5), "drafting_goes_on": (True, 3),
    }  # fmt: skip


def test_inapplicable_partial_verification_is_skipped(bench, tiny_models, small_view):
    done, body = bench("large-context", tiny_models["llama"], "--num-speculative-tokens", "0")
    assert {case["specpv"] for case in engine_cases(body)} == {"off"} and "no partial verification" not in done.stderr
    done, body = bench("large-context", tiny_models["llama"], "--dtype", "float32")
    assert {case["specpv"] for case in engine_cases(body)} == {"off"}
    assert "llama at 256 tokens: this machine has no kernel that reads a part of the cache in float32" in done.stderr


def test_stress_covers_all_draft_counts_and_cache_sizes():
    full = recipe.read("stress", "full", BenchConfig())
    assert (full.contexts, full.counts) == ((16384, 32768, 65536), (0, 2, 3, 4, 5))
    for scope in ("full", *recipe.SCOPES):
        stress = recipe.read("stress", scope, BenchConfig())
        assert (stress.counts, stress.cache_fractions) == ((0, 2, 3, 4, 5), (0.75, 0.9))
        assert (stress.specpvs, stress.transformers, stress.prompts_once) == (("off", "lossless"), ("none",), True)
    for scope in recipe.SCOPES:
        short = recipe.read("large-context", scope, BenchConfig())
        assert (short.counts, short.specpvs) == ((0, 3), ("off", "lossless"))
        assert len(short.cache_fractions) == len(short.contexts) == 1
    for name in ("stress", "large-context"):
        for scope in recipe.SCOPES:
            short = recipe.read(name, scope, BenchConfig())
            # Contexts must be long enough for the default view.
            assert min(short.contexts) >= SparseViewConfig.from_options(EngineConfig()).min_length
    assert recipe.read("single", "full", BenchConfig()).specpvs == ("off",)


@compiled
def test_stress_beyond_the_cache_reports_capacity(bench, tiny_models, monkeypatch):
    """Only the rows that do not fit."""
    monkeypatch.setattr("mlaforge.engine.memory.free_bytes", lambda device: 1 << 30)
    # Room for two requests of 12 blocks, each of 16 tokens of 192 numbers in bf16.
    fraction = 1.01 * 2 * 12 * 16 * 192 * 2 / 2**30
    words = ("--context", "160", "--batch", "1,3", "--cache-fraction", fraction)
    done, body = bench("stress", tiny_models["llama"], *words)
    one, three = engine_cases(body, batch=1), engine_cases(body, batch=3)
    assert [case["status"] for case in one] == 9 * ["ok"] and [case["status"] for case in three] == 9 * ["capacity"]
    # The limit is what would have fit: two requests of 12 blocks.
    assert {case["limit"]["tokens"] for case in three} == {2 * 12 * 16}
    assert all("the cache holds 384 tokens" in case["limit"]["what"] for case in three)
    assert "capacity: the cache holds 384 tokens" in done.stdout


@compiled
def test_stress_runs_the_whole_grid(bench, tiny_models, monkeypatch):
    """On a model with windows, YaRN, experts and sinks: every case runs, with partial steps where tokens are drafted;
    the tokens equal plain decoding's; each prompt is computed once, as longer prompts extend the shorter ones."""
    computed, decode = [], EnginePeer.decode

    def counting(self, prompts, tokens):
        before = dataclasses.replace(self.engine.stats())
        repetition = decode(self, prompts, tokens)
        after = self.engine.stats()
        cached = after.cached_prompt_tokens - before.cached_prompt_tokens
        computed.append(after.prompt_tokens - before.prompt_tokens - cached)
        return repetition

    monkeypatch.setattr(EnginePeer, "decode", counting)
    words = ("--context", "160,256", "--rounds", "1", "--cache-fraction", "0.0005,0.001", "--draft", "ngram")
    _, body = bench("stress", tiny_models["gpt_oss"], *words)
    assert {case["engine"] for case in body["cases"]} == {"mlaforge"} and body["config"]["prompts_once"]
    for fraction in (0.0005, 0.001):
        for context in (160, 256):
            cases = engine_cases(body, context=context, cache_fraction=fraction)
            assert [(c["num_speculative_tokens"], c["specpv"]) for c in cases] == [
                (0, "off"), *((k, specpv) for k in (2, 3, 4, 5) for specpv in ("off", "lossless")),
            ]  # fmt: skip
            assert {case["status"] for case in cases} == {"ok"} and len({c["output_sha256"] for c in cases}) == 1
            assert all(c["eagle_speculation"]["partial_steps"] for c in cases if c["specpv"] == "lossless")
            # Only the case that computed the prompts has a time to first token.
            assert [c["time_to_first_token"] for c in cases[1:]] == 8 * [None]
    firsts = [case for case in engine_cases(body) if case["time_to_first_token"]]
    assert len(firsts) == 2 and {case["context"] for case in firsts} == {160}
    # Once per cache; full blocks are reused, and at least the last token is recomputed.
    assert [tokens for tokens in computed if tokens > 16] == [160, 256 - 160] * 2 and len(computed) == 2 * 2 * 2 * 9


@compiled
@pytest.mark.parametrize("where", ["decoding", "the audit"])
def test_out_of_memory_anywhere_reports_capacity(bench, tiny_models, monkeypatch, where):
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
    assert [case["status"] for case in engine_cases(body)] == ["ok", "ok", "capacity"]
    limit = engine_cases(body)[-1]["limit"]
    assert "out of memory" in limit["what"] and "\n" not in limit["what"] and "--cache-fraction" in limit["change"]
    assert all(entry["passed"] for entry in body["perf"])


@pytest.mark.parametrize(("owner", "name", "words"), [
    (BlockTables, "free", "are in the cache"), (Engine, "abort", "requests are left"),
    (BlockPool, "release", "references, but 0 users"),
])  # fmt: skip
def test_leaked_requests_and_blocks_end_the_run(bench, tiny_models, monkeypatch, owner, name, words):
    if owner is Engine:
        # After a step without memory, its requests must be aborted.
        monkeypatch.setattr(Engine, "step", lambda self: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
    monkeypatch.setattr(owner, name, lambda self, *ignored: None)
    done, _ = bench("large-context", tiny_models["llama"], "--num-speculative-tokens", "0", code=1)
    assert "an invariant is broken: cache_integrity" in done.stderr and words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def peer(tiny_models):
    config = resolve(EngineConfig, None, dtype="bfloat16", device="cpu", cache_bytes=4 << 20, num_speculative_tokens=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SparseViewConfig, "from_options", lambda *ignored: VIEW)
        engine_peer = EnginePeer(tiny_models["llama"], "llama", None, config, 300, 2)
    yield engine_peer
    engine_peer.close()


@compiled
def test_audit_covers_partial_verification(peer, monkeypatch):
    """The invariants hold, and a draft that is shorter than the partial steps is detected."""
    prompts = [list(range(3, 203)), list(range(203, 3, -1))]
    peer.run(prompts, 12, Variant())
    findings = Audit(peer).run(prompts, 12, Variant(3, "replay", "lossless"))
    assert [finding.name for finding in findings if not finding.passed] == []
    assert peer.engine.speculation.stats.sparse_steps > 0
    # The engine switches between both kinds of verification.
    peer.set_variant(Variant(3, "replay"), [[], []], prompts)
    assert peer.engine.speculation.sparse_view is None
    propose = peer.engine.speculation.__class__.propose

    def shorter(self, decision, chunks):
        proposal = propose(self, decision, chunks)
        drafts = {s: dataclasses.replace(draft, token_ids=draft.token_ids[:1]) for s, draft in proposal.drafts.items()}
        chunks = [(s, min(upto, len(s.token_ids) + len(drafts[s].token_ids) if s in drafts else upto))
                  for s, upto in proposal.chunks]  # fmt: skip
        return dataclasses.replace(proposal, drafts=drafts, chunks=chunks)

    monkeypatch.setattr(peer.engine.speculation.__class__, "propose", shorter)
    findings = Audit(peer).run(prompts, 12, Variant(3, "replay", "lossless"))
    assert [finding.name for finding in findings if not finding.passed] == ["drafting_goes_on"]


SMALL_VIEW = SparseViewConfig(sink=16, retrieval=32, window=32, full_every=8, max_provisional=8)


def step_counts(steps, partial, pending, length):
    return {"steps": steps, "partial_steps": partial, "pending_tokens": pending, "mean_acceptance_length": length}


def test_ceiling_counts_bytes_and_flops_of_partial_and_full_steps(tiny_models):
    """Memory-bound, compared with the sizes of the checkpoint's tensors."""
    source = SourceModel.open(str(tiny_models["llama"]))
    plan, slow = plan_of(source.config, source.spec), Gpu("cpu", 1e3, 0.05, 8.0, "made up", achievable=1.0)
    tensors = load_file(tiny_models["llama"] / "model.safetensors")
    weights = sum(4 * t.numel() for name, t in tensors.items() if t.ndim == 2 and "embed_tokens" not in name)
    row, context = 192 * 4, 20_000
    partial, full = weights + SMALL_VIEW.num_tokens * row, weights + context * row
    # 10 full steps, and 25 partial ones that accepted 60 tokens, 30 of which were retained.
    top = roof.sparse_view_limit(
        plan, slow, "float32", context, 1, 3, SMALL_VIEW, "float32", step_counts(10, 25, 60, 4.0)
    )
    seconds = (full + 2.5 * partial) / slow.bandwidth
    assert top["tokens_per_second"] == pytest.approx(4 / seconds, rel=1e-2)
    assert top["limit"] == "cache bandwidth"
    # All 6 tokens of a cycle retained, over 2.4 tokens of a full step.
    assert top["specpv_ceiling"] == pytest.approx(7 / seconds / (2.4 / (full / slow.bandwidth)), rel=1e-2)
    # Every draft accepted: two partial steps accept eight tokens.
    assert top["speedup_ceiling"] == pytest.approx(9 * full / (full + 2 * partial), rel=1e-2)
    # Nothing to gain where a step reads little of the cache.
    short = roof.sparse_view_limit(
        plan, slow, "float32", 160, 1, 3, SMALL_VIEW, "float32", step_counts(10, 20, 80, 9.0)
    )
    assert short["specpv_ceiling"] < 1 < roof.limit(plan, slow, "float32", 160, 1, 3, 4.0)["speedup_ceiling"]


def test_no_cycle_exceeds_its_ceiling(tiny_models):
    """Uneven steps, compute-bound ones too: the ceiling from their mean is no slower."""
    source = SourceModel.open(str(tiny_models["llama"]))
    plan = plan_of(source.config, source.spec)
    for flops in (1e-4, 1e-2, 1e3):
        gpu = Gpu("cpu", flops, 0.05, 8.0, "made up", achievable=1.0)

        def seconds(context, queries, gpu=gpu):
            return roof.step_seconds(plan, gpu, "float32", context, 1, queries)[0]

        for cycles in ([(6, 2)], [(4, 4), (1, 1, 1)], [(1,) * 8, (4, 4), (6, 2)]):
            partial, pending = sum(map(len, cycles)), sum(map(sum, cycles))
            took = sum(seconds(SMALL_VIEW.num_tokens, rows) for cycle in cycles for rows in cycle)
            took += sum(seconds(4000, 1 + sum(cycle)) for cycle in cycles)
            block = step_counts(len(cycles), partial, pending, 1 + pending / len(cycles))
            top = roof.sparse_view_limit(plan, gpu, "float32", 4000, 1, 5, SMALL_VIEW, "float32", block)
            assert top["tokens_per_second"] * (1 + 1e-9) >= (len(cycles) + pending) / took


def test_gates_of_partial_verification():
    """The shipped gates of all scopes pass near full verification, fail below it, and know their ceiling."""
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

    def judge(target, *cases):
        body = {"scenario": "large-context", "cases": list(cases), "roof": {"name": "h200"}, "perf": None}
        return gate.judge(target, {"large-context": body})

    off = case("off", [100.0, 100.0])
    verdict = judge(speed, off, case("lossless", [97.0, 99.0], 1.6))
    assert (verdict["verdict"], verdict["ceiling"], verdict["against"]) == ("pass", 1.6, "full verification")
    assert verdict["value"] == pytest.approx(0.98) and "every pending token kept" in verdict["ceiling_reason"]
    assert judge(speed, off, case("lossless", [90.0, 92.0], 1.6))["verdict"] == "fail"
    # Above the ceiling.
    assert judge(speed, off, case("lossless", [80.0, 80.0], 0.9))["verdict"] == "unreachable"
    # Rows are compared within the same cache size.
    other = [case("off", [10.0, 10.0], cache=0.9), case("lossless", [5.0, 5.0], 1.6, cache=0.9)]
    verdict = judge(speed, off, case("lossless", [120.0, 120.0], 1.6), *other)
    assert (verdict["verdict"], verdict["value"], verdict["case"]) == ("fail", 0.5, "lossless 0.9")
    # A share of the roofline above 1 means a wrong measurement.
    assert judge(share, off, case("lossless", [1.0], fraction=1.02))["verdict"] == "fail"
    assert judge(share, off, case("lossless", [1.0], fraction=0.9))["verdict"] == "pass"
    # Not asked without partial verification or with prompt lookup.
    for rows in ([off], [off, case("lossless", [50.0], draft="ngram")]):
        verdict = judge(speed, *rows)
        assert verdict["verdict"] == "not asked" and "--specpv" in verdict["reason"]
    too_large = case("lossless", [1.0], status="capacity", limit={"what": "no room", "change": "less"})
    verdict = judge(speed, off, too_large)
    assert verdict["verdict"] == "missing" and "no room" in verdict["reason"]
    # Results that predate partial verification.
    old = {key: value for key, value in off.items() if key not in ("specpv", "cache_fraction")}
    assert judge(speed, old)["verdict"] == "not asked"
    length = gate.Gate("l", ("full",), "large-context", "mean_acceptance_length", 2.0, None, {}, None, "large-context")
    block = {"mean_acceptance_length": 6.5, "num_speculative_tokens": 8}
    assert judge(length, case("lossless", [1.0], eagle_speculation=block))["ceiling"] == 9.0
