"""Engines that draft, and the statistics of what comes out."""

import dataclasses
from collections import Counter

import pytest

from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.engine.speculation.sparse_view import SparseViewConfig

CASES = [("llama", None), ("gpt_oss", None), ("mistral", "latent_rope"), ("qwen3", "latent"), ("gpt_oss", "latent")]


def speculate(engine, drafter, count=3, tree=0, prompt_lookup=False, adaptive=False, view=None, dtype="model"):
    """Draft by `drafter`: chains, trees of `tree` tokens, or under sparse views; return the engine's speculation."""
    engine.set_drafter(
        drafter, count, prompt_lookup, view, adaptive_speculation=adaptive, specpv=view is not None,
        specpv_dtype=dtype, speculative_tree_tokens=tree,
    )  # fmt: skip
    return engine.speculation


# A sparse view of a few tokens.
SMALL = SparseViewConfig(retrieval=32, window=32, full_every=3, max_provisional=9)


class AnyLength(SparseViewConfig):
    """A view that is used for short texts too, even where it holds all of their tokens."""

    min_length = 1


# A view that leaves out most of a short text, and so agrees to wrong tokens at times.
NARROW = AnyLength(sink=1, retrieval=0, window=16, full_every=2, max_provisional=3)


def partly(engine, drafter, count=3, prompt_lookup=False, dtype="auto", base=SMALL, **view):
    """Verify what `drafter` proposes under small sparse views first; return the engine's speculation."""
    view = dataclasses.replace(base, **view)
    return speculate(engine, drafter, count, prompt_lookup=prompt_lookup, view=view, dtype=dtype)


def tokens(output):
    return [completion.token_ids for completion in output.outputs]


HOW = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "filters": {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "temperature": 0.8},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": -0.5},
    # In texts of four tokens much occurred before.
    "bias": {"logit_bias": {**dict.fromkeys(range(20, 24), 100.0), 5: 3.0, 17: -100.0}},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": tuple(range(0, 250, 3)), "max_tokens": 24},
    "greedy penalties": {"repetition_penalty": 1.5, "temperature": 0.0},
    "greedy min_tokens": {"min_tokens": 9, "stop_token_ids": tuple(range(0, 250, 3)), "temperature": 0.0},
    "stop": {"stop": ("a", "e", "\n")},
    "json": {"json_schema": {"type": "array", "items": {"type": "integer"}, "maxItems": 4}},
    "regex": {"regex": "(ab|cd|ef){3,9}"},
}


def drawn(llm, prompt, vocabulary, length):
    """How often each continuation of so many of these tokens came, of 600 at temperature 2."""
    bias = dict.fromkeys(vocabulary, 100.0)
    how = SamplingParams(temperature=2.0, max_tokens=length, ignore_eos=True, logit_bias=bias)
    counts: Counter[tuple[int, ...]] = Counter()
    # Requests, because the first step of a continuation has no draft of a head; the first computes the prompt.
    for seeds in (range(1), range(1, 300), range(300, 600)):
        outputs = llm.generate([prompt] * len(seeds), [dataclasses.replace(how, seed=seed) for seed in seeds])
        counts.update(tuple(output.outputs[0].token_ids) for output in outputs)
    return counts


def deviations(counts, probabilities):
    """How many standard deviations Pearson's statistic of counts against exact probabilities is above its mean: the
    cube root of a chi-square is nearly normal (Wilson and Hilferty). Outcomes expected less than five times are one."""
    total = sum(counts.values())
    common = {outcome: p for outcome, p in probabilities.items() if p * total >= 5}
    rest = max(1e-9, 1 - sum(common.values())) * total
    seen_rest = total - sum(counts.get(outcome, 0) for outcome in common)
    statistic = sum((counts.get(o, 0) - p * total) ** 2 / (p * total) for o, p in common.items())
    assert rest >= 5 or seen_rest <= 12
    if rest >= 5:
        statistic += (seen_rest - rest) ** 2 / rest
    freedom = len(common) - 1 + (rest >= 5)
    assert freedom > 10
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5


def outcomes(oracle, prompt, length, vocabulary, temperature):
    """Exact probabilities of all continuations of this length over a few tokens."""
    found = {(): 1.0}
    for _ in range(length):
        longer = {}
        for tail, probability in found.items():
            logits = oracle.logits([*prompt, *tail])[-1].double()[vocabulary] / temperature
            for token, p in zip(vocabulary, logits.softmax(-1).tolist(), strict=True):
                longer[*tail, token] = probability * p
        found = longer
    return found


def check_identities(stats):
    """Between the numbers of `eagle_speculation`."""
    block = stats.block()
    k = block["num_speculative_tokens"]
    assert 0 <= block["accepted_drafts"] <= block["drafted"] <= k * block["steps"]
    assert block["total_accepted_tokens"] <= block["accepted_drafts"] + block["steps"]
    assert block["total_accepted_tokens"] >= max(block["steps"], block["accepted_drafts"])
    assert 1 <= block["mean_acceptance_length"] <= 1 + k
    assert sum(stats.drafted_at) == stats.drafted and sum(stats.accepted_at) == stats.accepted
    assert stats.accepted_at == sorted(stats.accepted_at, reverse=True)
    assert stats.drafted_at == sorted(stats.drafted_at, reverse=True)
    if stats.drafted:
        assert block["mean_acceptance_rate"] == stats.accepted / stats.drafted
        assert all(p is None or 0 <= p <= 1 for p in block["acceptance_per_position"])
    assert block["share_of_length_2_or_more"] <= block["mean_acceptance_length"] - 1 + 1e-12
    assert block["mean_acceptance_length"] - 1 <= k * block["share_of_length_2_or_more"] + 1e-12
    shares = block["time_shares"]
    assert sum(shares.values()) == pytest.approx(1) and min(shares.values()) >= 0
    active = block["active_slots"]
    assert 1 <= active["min"] <= active["average"] <= active["max"]
    assert set(block["definitions"]) <= set(block)


def watch_selections(llm, observe):
    """Call observe(inputs, outputs) for every token selection of the engine, as inputs and outputs of SELECT_TOKENS."""

    def watched(select):
        def call(*inputs):
            outputs = select(*inputs)
            observe(inputs, outputs)
            return outputs

        return call

    for layer in llm.engine.model.layers:
        if (sparse := layer.attention.sparse) is not None and sparse.index is not None:
            sparse.select = watched(sparse.select)
