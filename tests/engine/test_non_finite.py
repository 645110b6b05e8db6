"""Logits with NaN or infinity end the request that has them with an error that names the dtype, and nobody else's.

A token's embedding is beyond float16's largest number: whoever reads it overflows, everybody else does not.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from mlaforge.engine.config import EngineConfig
from mlaforge.engine.engine import Engine
from mlaforge.engine.llm import LLM
from mlaforge.engine.request.output import NonFiniteLogits
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.engine.sampling.sampler import NO_TOKEN, Sampler, checked, rejection_sampled
from mlaforge.engine.sampling.state import SamplingState
from mlaforge.engine.speculation.lookup import PromptLookupDrafter
from support.eagle3_heads import saved
from support.engine_driver import greedy, idle, random_prompts, watch
from support.serving import serving
from support.speculating import partly, speculate

POISON = 200
WHY = "the model's logits have NaN or infinity in float16: float16 ends at 65504; load it with dtype bfloat16"
NEW = 12


@pytest.fixture(scope="module")
def overflowing(tiny_models, tmp_path_factory):

    directory = tmp_path_factory.mktemp("overflowing") / "model"
    shutil.copytree(tiny_models["llama"], directory)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = 1e5
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def llm(overflowing):
    llm = LLM(overflowing, dtype="float16", device="cpu", cache_bytes=1 << 20)
    watch(llm.engine)
    return llm


# The token is read in the prompt, or drawn first and read then.
DRAWN = {"logit_bias": {POISON: 100.0}, "temperature": 0.5}
HOW = {
    "greedy": {"temperature": 0.0},
    "greedy, with penalties": {"temperature": 0.0, "repetition_penalty": 1.5},
    "drawn": {"seed": 1},
    "drawn, with filters": {"top_k": 5, "top_p": 0.9, "min_p": 0.01},
    "log probabilities": {"temperature": 0.0, "logprobs": 3},
    "drawn, log probabilities": {"logprobs": 0},
    "the prompt's log probabilities": {"prompt_logprobs": 0, "temperature": 0.0},
    "the prompt's alone": {"prompt_logprobs": 2, "max_tokens": 0},
    "a regex": {"regex": "(ab|cd)+"},
    "a schema": {"json_schema": {"type": "array", "items": {"type": "integer"}}, "temperature": 0.0},
    "several": {"n": 3},
    "the token is drawn": DRAWN,
    "the token is drawn greedily": {**DRAWN, "temperature": 0.0, "logprobs": 1},
}


@pytest.mark.parametrize("how", HOW)
def test_non_finite_logits_end_only_their_request(how, llm):
    asked, neighbours = random_prompts(20, 9, 33)[0], random_prompts(9, 33, seed=1)
    neighbours = [[token for token in prompt if token != POISON] for prompt in neighbours]
    alone = llm.generate(neighbours, greedy(NEW))
    before = llm.engine.stats().non_finite_requests
    prompt = asked if "drawn" in how and "the token" in how else [*asked, POISON, 7]
    params = [SamplingParams(**{"max_tokens": NEW, **HOW[how]}), *[greedy(NEW)] * 2]
    with pytest.raises(NonFiniteLogits, match=WHY) as raised:
        llm.generate([prompt, *neighbours], params)
    bad, *good = raised.value.outputs
    assert bad.non_finite and bad.error.startswith(WHY) and bad.finished
    assert {completion.finish_reason for completion in bad.outputs} == {"error"}
    token_ids = [completion.token_ids for completion in bad.outputs]
    assert token_ids == ([[POISON]] if "the token" in how else [[]] * params[0].n)
    assert [o.outputs[0].token_ids for o in good] == [o.outputs[0].token_ids for o in alone]
    assert llm.engine.stats().non_finite_requests == before + 1
    idle(llm.engine)


def test_rows_of_a_failed_request_are_not_cached(overflowing):
    """Its first chunk is in the cache before it is noticed, and holds NaN before the token too."""
    llm = LLM(overflowing, dtype="float16", device="cpu", cache_bytes=1 << 20, max_num_batched_tokens=64)
    beginning = [*range(3, 43)]
    for ending in ([POISON, *range(100)], [POISON, *beginning, *beginning]):
        with pytest.raises(NonFiniteLogits):
            llm.generate([[*beginning, *ending]], greedy(2))
        output = llm.generate([[*beginning, 9]], greedy(2))[0]
        assert len(output.outputs[0].token_ids) == 2
        llm.engine.check_integrity()


def test_stream_yields_the_error_and_raises_at_its_end(llm):
    outputs = llm.stream([[3, POISON], [3, 4]], greedy(3))
    seen = []
    with pytest.raises(NonFiniteLogits, match=WHY):
        for output in outputs:
            seen.append((output.outputs[0].finish_reason, output.error is not None))
    assert ("error", True) in seen and ("length", False) in seen


GREEDY, SEEDED = {"temperature": 0.0}, {"seed": 3}


@pytest.mark.parametrize(
    ("way", "params"),
    [("copies", SEEDED), ("a head", GREEDY), ("a tree", SEEDED), ("a sparse view", GREEDY), ("a sparse view", SEEDED)],
    ids=str,
)
def test_drafts_do_not_hide_non_finite_logits(way, params, overflowing, tmp_path):
    """Verification reads the token among drafted ones, or in the text."""
    head = saved(tmp_path) if way in ("a head", "a tree") else None
    options = {"speculative": str(head), "num_speculative_tokens": 3} if head else {}
    llm = LLM(overflowing, dtype="float16", device="cpu", cache_bytes=1 << 22, **options)
    loop = [5, 6, 7, 8] * 50
    if way == "copies":
        speculate(llm.engine, PromptLookupDrafter())
    elif way == "a tree":
        speculate(llm.engine, llm.engine.speculation.drafter, tree=8)
    elif not head:
        partly(llm.engine, PromptLookupDrafter(), dtype="model")
    watch(llm.engine)
    how = SamplingParams(**{"max_tokens": NEW, "ignore_eos": True, **params})
    # Drafts are made of a loop, and the token stands in it.
    for prompt, bias in (([*loop, POISON, *loop], {}), ([*loop, POISON, 5, 6, *loop[:150], 5][-250:], {POISON: 100.0})):
        with pytest.raises(NonFiniteLogits, match=WHY) as raised:
            llm.generate([prompt], SamplingParams(**{**vars(how), "logit_bias": bias}))
        assert raised.value.outputs[0].outputs[0].token_ids in ([], [POISON])
        idle(llm.engine)
    assert len(llm.generate([loop], how)[0].outputs[0].token_ids) == NEW


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_detects_each_non_finite_value_in_its_row(value, dtype):
    logits = torch.full((3, 50), 6e4, dtype=dtype)
    logits[1, 17] = value
    assert (checked(torch.arange(3), logits) == torch.tensor([0, NO_TOKEN, 2])).all()
    for params in ({"temperature": 0.0}, {}, {"temperature": 0.0, "presence_penalty": 1.0}, {"top_p": 0.5}):
        states = [SamplingState(SamplingParams(**params), [1], 50, (), "cpu") for _ in range(3)]
        sampled = Sampler()(logits, states)
        assert [token == NO_TOKEN for token in sampled.token_ids.tolist()] == [False, True, False]


def test_draft_drawn_from_nan_is_rejected():
    """The token is one of p, over all of its vocabulary, not of what the head has no token for."""
    p = torch.zeros(1, 6)
    p[0, :3] = torch.tensor([0.2, 0.3, 0.5])
    q = torch.tensor([torch.nan, torch.nan, torch.nan, 0, 0, 0])
    states = [SamplingState(SamplingParams(seed=seed), [1], 6, (), "cpu") for seed in range(300)]
    drawn = torch.cat([rejection_sampled(p, [state], [(1, q)]) for state in states])
    assert (drawn.bincount(minlength=6)[:3] > 30).all() and drawn.max() < 3


def test_server_reports_non_finite_logits(overflowing):
    """No request is told that the fault is its own; both places that watch the server count it."""
    config = EngineConfig(dtype="float16", device="cpu", cache_bytes=1 << 20)
    with serving(Engine(overflowing, config)) as served:
        bad = {"prompt": [3, POISON, 4], "max_tokens": 4, "temperature": 0}
        variants = [{}, {"logprobs": 2}, {"regex": "(ab)+"}, {"n": 2, "temperature": 1}, {"echo": True, "logprobs": 0}]
        for more in variants:
            answer = served.post("/v1/completions", json={**bad, **more})
            assert served.refused(answer, 500).startswith(WHY), more
            assert answer.json()["error"]["code"] == "non_finite_logits"
            streamed = served.post("/v1/completions", json={**bad, **more, "stream": True}).text
            events = [json.loads(event.removeprefix("data: ")) for event in streamed.split("\n\n") if event]
            assert events[-1]["error"]["message"].startswith(WHY), streamed
            assert all(choice["finish_reason"] == "error" for event in events[:-1] for choice in event["choices"])
        good = served.post("/v1/completions", json={**bad, "prompt": [3, 4]}).json()
        assert good["usage"]["completion_tokens"] == 4
        assert served.http.get("/health").json() == {"status": "ok", "non_finite_requests": 2 * len(variants)}
        assert f"mlaforge_requests_non_finite_total {2 * len(variants)}.0" in served.http.get("/metrics").text
        served.settles()


@pytest.mark.parametrize(("params", "tree"), [(GREEDY, 8), (SEEDED, 0)], ids=str)
def test_overflowing_head_changes_no_token(params, tree, tiny_models, tmp_path):
    llm = LLM(
        tiny_models["llama"], dtype="float32", device="cpu", cache_bytes=1 << 22, speculative=str(saved(tmp_path)),
        num_speculative_tokens=3, speculative_tree_tokens=tree, adaptive_speculation=False,
    )  # fmt: skip
    how = SamplingParams(**{"max_tokens": NEW, "ignore_eos": True, **params})
    plain = llm.generate([[*range(3, 40)]], SamplingParams(**{**vars(how), "speculate": False}))[0].outputs[0].token_ids
    drafter = llm.engine.speculation.drafter
    logits = drafter.head.logits
    drafter.head.logits = lambda hidden: torch.full_like(logits(hidden), torch.nan)
    token_ids = llm.generate([[*range(3, 40)]], how)[0].outputs[0].token_ids
    assert len(token_ids) == NEW and (token_ids == plain or "seed" in params)
    assert all(0 <= token < 260 for token in token_ids)
    idle(llm.engine)
