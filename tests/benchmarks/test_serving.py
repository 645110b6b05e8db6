"""Benchmark of steady serving: requests, and measurements of the answers."""

import argparse
import itertools
import random
import statistics

import pytest

from benchmarks import serving


def test_arrivals_are_poisson_and_reproducible():
    texts = serving.Texts(lambda text, **_: {"input_ids": list(range(40))})
    options = argparse.Namespace(requests=4000, prompt=20, answer=3, long=0)
    answers, repeated = (list(texts.steady(random.Random("0 4.0"), 4.0, options)) for _ in range(2))
    assert answers == repeated
    gaps = [b.arrives - a.arrives for a, b in itertools.pairwise(answers)]
    # An exponential distribution has equal mean and deviation, here 1/4 s, and 63 % of it is below the mean.
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.06) == statistics.stdev(gaps)
    assert sum(gap < 0.25 for gap in gaps) / len(gaps) == pytest.approx(0.632, abs=0.03)
    assert {len(answer.prompt) for answer in answers} == set(range(10, 31))
    assert {answer.tokens for answer in answers} == {2, 3, 4}


def test_measurements_of_answers():
    answers = [
        serving.Answer(0.0, [1], 3, times=[0.5, 0.6, 0.8]), serving.Answer(1.0, [1], 2, times=[1.25, 2.0]),
    ]  # fmt: skip
    row = serving.measured(answers)
    assert (row["requests_per_second"], row["tokens_per_second"]) == (1.0, 2.5)
    assert row["ttft"]["p50"] == 0.375 and row["gap"]["p50"] == 0.2 and 0.7 < row["gap"]["p99"] < 0.75
    rows = [{"side": side, "rate": 2.0, "round": n, **row, "requests_per_second": rate}
            for side, rates in (("today", (1, 5, 3)), ("base", (2, 2, 4))) for n, rate in enumerate(rates)]  # fmt: skip
    rows += [{"side": "today", "rate": None, "round": n, "together": [n, 2 - n]} for n in range(3)]
    lines = serving.short({"base": "1234567", "rows": [row for row in rows if row["rate"]]})
    assert [(line["side"], line["requests_per_second"]) for line in lines] == [("today", 3), ("base", 2)]
    assert [line.get("over_base", [None])[0] for line in lines] == [1.0, None]
    together = serving.short({"base": None, "rows": rows[-3:]})
    assert together == [{"rate": None, "side": "today", "together": [1, 1]}]
    text = serving.table([*lines, *together])
    assert text.splitlines()[0].split() == list(lines[0]) and text.endswith("today: [1, 1]")


def test_a_share_of_the_prompts_is_long():
    texts = serving.Texts(lambda text, **_: {"input_ids": list(range(40))})
    options = argparse.Namespace(requests=2000, prompt=20, answer=3, long=0.25, long_prompt=(100, 200))
    answers = list(texts.steady(random.Random(0), 4.0, options))
    assert {answer.long for answer in answers if len(answer.prompt) >= 100} == {True}
    assert sum(answer.long for answer in answers) / 2000 == pytest.approx(0.25, abs=0.03)
    for answer in answers:
        answer.times = [answer.arrives + (2.0 if answer.long else 1.0)]
    row = serving.measured(answers)
    assert set(row["short"]) == {1.0} and set(row["long"]) == {2.0}
