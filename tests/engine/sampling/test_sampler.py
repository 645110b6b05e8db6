"""The sampler against numpy, transformers' logits processors and statistics; sampling states."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mlaforge.engine.sampling.logprobs import logprobs_of
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.engine.sampling.sampler import TOP_P_WIDTHS, Sampler
from mlaforge.engine.sampling.state import SamplingState, derived_seed
from mlaforge.runtime import UserError

V = 50
SAMPLER = Sampler()


def state(prompt=(), output=(), vocab_size=V, eos=(), index=0, **params):
    made = SamplingState(SamplingParams(**params), list(prompt), vocab_size, eos, "cpu", index=index)
    made.append(list(output))
    return made


def logits_of(rows, vocab_size=V, seed=0):
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


# --- greedy


def test_plain_greedy_is_one_argmax_in_the_logits_own_dtype(monkeypatch):
    logits = torch.zeros(3, V, dtype=torch.bfloat16)
    logits[0, [7, 30]] = 2.0  # of equal logits the lowest id
    logits[1, 9] = 1.0
    monkeypatch.setattr(SAMPLER, "adjust", lambda *_: pytest.fail("a plain batch needs no adjusting"), raising=False)
    states = [state(temperature=0) for _ in range(3)]
    assert all(s.plain for s in states)
    assert SAMPLER(logits, states).token_ids.tolist() == [7, 9, 0]


def test_plain_excludes_adjusted_and_random_states():
    assert not state(temperature=1.0).plain
    for params in ({"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"frequency_penalty": 0.1},
                   {"logit_bias": {1: 1.0}}, {"min_tokens": 2, "stop_token_ids": [3]}):  # fmt: skip
        assert not state(temperature=0, **params).plain
    # min_tokens matters only while it holds something back.
    assert state(temperature=0, min_tokens=2).plain
    assert state(temperature=0, min_tokens=2, eos=[4], output=[1, 1]).plain
    assert state(temperature=0, top_k=5, top_p=0.5).plain


def test_greedy_and_random_rows_in_one_batch():
    logits = logits_of(4)
    states = [state(temperature=t, seed=1) for t in (0.0, 1.0, 0.0, 0.7)]
    drawn = SAMPLER(logits, states).token_ids
    assert drawn[[0, 2]].tolist() == logits.argmax(-1)[[0, 2]].tolist()
    probabilities = SAMPLER.probabilities(logits, states)
    assert torch.equal(probabilities[[0, 2]], torch.nn.functional.one_hot(logits.argmax(-1), V)[[0, 2]].float())
    torch.testing.assert_close(probabilities[1], logits[1].softmax(-1))
    torch.testing.assert_close(probabilities[3], (logits[3] / 0.7).softmax(-1))


# --- adjusting


def test_penalties_by_their_formulas():
    logits = logits_of(1)
    prompt, output = [1, 2, 2, 3], [3, 4, 4, 4]
    result = SAMPLER.adjust(
        logits, [state(prompt, output, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25)]
    )[0]
    for token, value in enumerate(logits[0].tolist()):
        if token in prompt or token in output:
            value = value / 1.3 if value > 0 else value * 1.3
        value -= 0.25 * output.count(token) + 0.5 * (token in output)
        assert result[token].item() == pytest.approx(value, abs=1e-5)


def test_bias_comes_before_penalties():
    logits = torch.full((1, V), -1.0)
    result = SAMPLER.adjust(logits, [state([5], logit_bias={5: 3.0, 6: -100.0}, repetition_penalty=2.0)])[0]
    assert result[[5, 6, 7]].tolist() == [1.0, -101.0, -1.0]
    assert logits.eq(-1).all()


def test_min_tokens_suppresses_ends_of_text():
    options = {"min_tokens": 2, "stop_token_ids": [8], "temperature": 0}
    for output, held in (([], True), ([1], True), ([1, 1], False)):
        result = SAMPLER.adjust(logits_of(1), [state(output=output, eos=[3, V + 5], **options)])[0]
        assert (result == -torch.inf).nonzero()[:, 0].tolist() == ([3, 8] if held else [])


def test_rows_do_not_disturb_each_other():
    """Every kind of row in one batch gives what it gives alone: adjusted logits, probabilities and tokens."""
    logits = logits_of(7, seed=3)
    kinds = [
        {"temperature": 0}, {"temperature": 1.0}, {"top_k": 3}, {"top_p": 0.6, "top_k": 9}, {"min_p": 0.2},
        {"repetition_penalty": 1.5, "top_p": 0.9}, {"logit_bias": {4: 50.0}, "temperature": 0, "presence_penalty": 1.0},
    ]  # fmt: skip

    def made():
        return [state([1, 2], [3, 4], seed=n, **kind) for n, kind in enumerate(kinds)]

    for step in (SAMPLER.adjust, SAMPLER.probabilities, lambda a, b: SAMPLER(a, b).token_ids):
        together = step(logits, made())
        for n, one in enumerate(made()):
            assert torch.equal(together[n], step(logits[n : n + 1], [one])[0]), (step, kinds[n])


# --- filters


def reference(logits, temperature=1.0, min_p=0.0, top_k=0, top_p=1.0):
    """Tokens that survive, one row of numpy, in fp64."""
    scaled = logits.astype(np.float64) / temperature
    alive = scaled >= scaled.max() + (np.log(min_p) if min_p else -np.inf)
    if 0 < top_k < len(scaled):
        alive &= scaled >= np.sort(np.where(alive, scaled, -np.inf))[-top_k]
    weights = np.where(alive, np.exp(scaled - scaled.max()), 0)
    weights /= weights.sum()
    if top_p < 1:
        mass = 0.0
        for token in np.argsort(-weights, kind="stable"):
            if mass >= top_p:
                alive[token] = False
            mass += weights[token]
    weights = np.where(alive, weights, 0)
    return alive, weights / weights.sum()


FILTERS = [
    {"top_k": 1}, {"top_k": 7}, {"top_k": V}, {"top_k": 10**6}, {"top_p": 0.01}, {"top_p": 0.5}, {"top_p": 0.999},
    {"min_p": 0.05}, {"min_p": 1.0}, {"temperature": 0.2, "top_p": 0.9},
    {"temperature": 5.0, "top_k": 20, "top_p": 0.8}, {"min_p": 0.02, "top_k": 12, "top_p": 0.7, "temperature": 1.7},
]  # fmt: skip


@pytest.mark.parametrize("vocab_size", [V, 2 * TOP_P_WIDTHS[-1]])
def test_filters_against_numpy(vocab_size):
    for seed in range(4):
        logits = logits_of(len(FILTERS), vocab_size, seed)
        result = SAMPLER.probabilities(logits, [state(vocab_size=vocab_size, **f) for f in FILTERS])
        for n, options in enumerate(FILTERS):
            alive, weights = reference(logits[n].numpy(), **options)
            assert np.array_equal(result[n].numpy() > 0, alive), options
            np.testing.assert_allclose(result[n].numpy(), weights, atol=2e-6)


def test_a_flat_row_needs_more_than_the_likeliest_and_a_steep_one_does_not():
    """The shortcut of top-p on a CPU and the full sort agree, also in one batch."""
    size = 2 * TOP_P_WIDTHS[-1]
    logits = torch.stack([logits_of(1, size)[0] / 100, logits_of(1, size)[0] * 3])
    result = SAMPLER.probabilities(logits, [state(vocab_size=size, top_p=0.9) for _ in range(2)])
    for n in range(2):
        assert np.array_equal(result[n].numpy() > 0, reference(logits[n].numpy(), top_p=0.9)[0])
        alone = SAMPLER.probabilities(logits[n : n + 1], [state(vocab_size=size, top_p=0.9)])
        assert torch.equal(alone[0], result[n])


def test_filters_keep_ties_of_the_last_token():
    logits = torch.tensor([[5.0, 3.0, 3.0, 3.0, 1.0]])
    for options in ({"top_k": 2}, {"top_p": 0.85}):
        retained = SAMPLER.probabilities(logits, [state(vocab_size=5, **options)])[0] > 0
        assert retained.tolist() == [True, True, True, True, False]


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_filters_against_transformers(options):
    logits = logits_of(6, seed=11)
    ids = torch.tensor([[1, 2, 3, 4, 4]] * 6)
    expected = RepetitionPenaltyLogitsProcessor(1.2)(ids, logits)
    if "temperature" in options:
        expected = TemperatureLogitsWarper(options["temperature"])(ids, expected)
    if "min_p" in options:
        expected = MinPLogitsWarper(options["min_p"])(ids, expected)
    if "top_k" in options:
        expected = TopKLogitsWarper(options["top_k"])(ids, expected)
    if "top_p" in options:
        expected = TopPLogitsWarper(options["top_p"])(ids, expected)
    result = SAMPLER.probabilities(
        logits, [state([1, 2], [3, 4, 4], repetition_penalty=1.2, **options) for _ in range(6)]
    )
    torch.testing.assert_close(result, expected.softmax(-1), rtol=1e-5, atol=1e-7)


# --- drawing


def chi_square(counts, expected):
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("seeded", [True, False])
def test_tokens_are_drawn_from_the_probabilities(seeded):
    """Chi-square over the tokens expected at least 20 times, and one of probability 1e-9 that never comes."""
    logits = logits_of(1, 20, seed=5)
    logits[0, 3] = logits.max() - 25
    draws, params = 30_000, {"temperature": 1.5, "top_k": 15, "vocab_size": 20}
    states = [state(seed=2000 + n if seeded else None, **params) for n in range(500)]
    states[0].generator.manual_seed(7)
    counts = torch.zeros(20)
    for _ in range(draws // 500):
        counts += torch.bincount(SAMPLER(logits.expand(500, -1), states).token_ids, minlength=20)
    expected = SAMPLER.probabilities(logits, states[:1])[0] * draws
    assert (counts[expected == 0] == 0).all()
    often = expected >= 20
    # 99.99 % of chi-square with 14 degrees of freedom lies below 42.6.
    assert 8 <= often.sum() <= 15
    assert chi_square(counts[often], expected[often]) < 42.6


def test_unlikely_tokens_have_their_probability():
    """Half of the mass lies on a quarter of a million tokens of 2e-6 each."""
    size = 2**18
    logits = torch.zeros(1, size)
    logits[0, 0] = np.log(size)
    states = [state(vocab_size=size, seed=3)]
    first = sum(int(SAMPLER(logits, states).token_ids) == 0 for _ in range(60))
    assert 15 <= first <= 45


def test_draw_uses_one_random_number_and_no_impossible_token(monkeypatch):
    """The least and the largest number there are, with impossible tokens at both ends and sums beside 1."""
    logits = torch.full((2, V), -1e9)
    logits[:, [7, 20, 41]] = torch.tensor([3.0, 1.0, 2.0])
    states = [state(temperature=0.9, seed=n) for n in range(2)]
    for number, token in ((0.0, 7), (1 - 2**-53, 41)):
        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "uniform_", lambda self, generator, number=number: self.fill_(number))
            assert SAMPLER(logits, states).token_ids.tolist() == [token, token]
    before = states[0].generator.get_state()
    SAMPLER(logits, states)
    torch.empty((), dtype=torch.float64).uniform_(generator=(same := torch.Generator()).set_state(before))
    assert states[0].generator.get_state().equal(same.get_state())


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch():
    logits = [logits_of(5, seed=n) for n in range(8)]

    def run(rows):
        states = [state(seed=40 + row, temperature=1.3, top_p=0.95) for row in rows]
        return [SAMPLER(step[rows], states).token_ids.tolist() for step in logits]

    together = run([0, 1, 2, 3, 4])
    for row in range(5):
        assert run([row]) == [[tokens[row]] for tokens in together]
    assert run([4, 2]) == [[tokens[4], tokens[2]] for tokens in together]


def test_seeds_of_continuations():
    assert derived_seed(5, 0) == 5
    seeds = {derived_seed(seed, index) for seed in range(20) for index in range(20)}
    assert len(seeds) == 400 and derived_seed(5, 3) == derived_seed(5, 3)
    assert derived_seed(None, 0) != derived_seed(None, 0)
    logits = torch.zeros(1, V)
    tokens = [[int(SAMPLER(logits, [s]).token_ids) for _ in range(5)] for s in (state(seed=-9), state(seed=2**64 - 1))]
    assert tokens[0] != tokens[1]


# --- log probabilities


def test_logprobs_are_of_the_raw_logits():
    logits = logits_of(4).to(torch.bfloat16)
    kinds = [{"logprobs": 3}, {}, {"logprobs": 0}, {"logprobs": 10**6}]
    states = [state([1], [2], temperature=0.3, repetition_penalty=2.0, logit_bias={6: 90.0}, **k) for k in kinds]
    sampled = SAMPLER(logits, states)
    result = sampled.logprobs()
    expected = logits.double().log_softmax(-1)
    assert sampled.token_ids.tolist() == [6] * 4
    assert result[1] is None
    assert [len(result[n].top) for n in (0, 2, 3)] == [3, 0, V]
    for n in (0, 2, 3):
        assert result[n].token_id == 6 and result[n].logprob == pytest.approx(expected[n, 6].item(), abs=1e-6)
        values = [value for _, value in result[n].top]
        assert values == sorted(values, reverse=True)
        assert values == pytest.approx([expected[n, token].item() for token, _ in result[n].top], abs=1e-6)
        assert values == pytest.approx(expected[n].topk(len(values)).values.tolist(), abs=1e-6)


def test_logprobs_of_a_large_vocabulary_do_not_drift():
    """fp32 log_softmax over 49,152 logits is off by 1e-5, always upwards: 100 tokens add it up to 1e-3."""
    logits = 3 * torch.randn(64, 49152, generator=torch.Generator().manual_seed(0))
    result = logprobs_of(logits, [7] * 64, [0] * 64)
    drift = sum(f.logprob for f in result) - logits.double().log_softmax(-1)[:, 7].sum().item()
    assert abs(drift) < 1e-4


def test_sampled_token_is_among_tied_logprobs():
    logits = torch.zeros(1, V)
    for token in (0, 20, V - 1):
        assert logprobs_of(logits, [token], [1])[0].top[0][0] == token


def test_prompt_logprobs_in_parts(monkeypatch):
    monkeypatch.setattr("mlaforge.engine.sampling.logprobs.MAX_LOGPROBS", 2 * V)
    logits, ids = logits_of(9), list(range(9))
    counts = [2, None, 1, 0, 2, 2, None, 3, 1]
    result = logprobs_of(logits, ids, counts)
    assert [None if f is None else len(f.top) for f in result] == counts
    expected = logits.double().log_softmax(-1)
    for n, one in enumerate(result):
        # A row of fp32 is summed in an order that the processor's vectors choose.
        assert one is None or one.logprob == pytest.approx(expected[n, n].item(), abs=2e-6)
    assert logprobs_of(logits, ids, [None] * 9) == [None] * 9


# --- the state


@given(st.lists(st.lists(st.integers(0, V - 1), max_size=5), max_size=12))
def test_state_is_independent_of_append_sizes(parts):
    """The state is one that saw them all at once."""
    options = {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": 0.2, "min_tokens": 4}
    grown, whole = state([1, 2], **options, eos=[0]), [token for part in parts for token in part]
    for part in parts:
        grown.append(part)
    fresh = state([1, 2], whole, **options, eos=[0])
    assert grown.token_ids == fresh.token_ids == whole and grown.generated == len(whole)
    assert grown.seen.counts_V.tolist() == [whole.count(token) for token in range(V)]
    assert torch.equal(grown.seen.counts_V, fresh.seen.counts_V) and grown.too_short == (len(whole) < 4)
    logits = logits_of(1)
    assert torch.equal(SAMPLER.adjust(logits, [grown]), SAMPLER.adjust(logits, [fresh]))


def test_no_memory_for_unused_parameters():
    assert state().seen is None and state().bias is None and state(eos=[1]).stop_ids is None


def test_rejects_tokens_outside_the_vocabulary():
    with pytest.raises(UserError, match=f"logit_bias names token {V}"):
        state(logit_bias={V: 1.0})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_host_never_waits_for_the_device():
    kinds = [{"temperature": 0}, {"top_k": 5, "top_p": 0.9, "seed": 1}, {"min_p": 0.1, "repetition_penalty": 1.2},
             {"logit_bias": {3: 1.0}, "min_tokens": 3}]  # fmt: skip
    states = [SamplingState(SamplingParams(**k), [1], V, [2], "cuda") for k in kinds]
    logits = logits_of(4).cuda()
    SAMPLER(logits, states)
    torch.cuda.set_sync_debug_mode("error")
    try:
        SAMPLER(logits, states)
    finally:
        torch.cuda.set_sync_debug_mode("default")
