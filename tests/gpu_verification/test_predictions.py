"""Predicted times of this package's kernels: the page, and the parts that are not the model's."""

import random
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch

from mlaforge.bench import kernels
from mlaforge.gpu_verification import predictions
from mlaforge.planning.published_kernels import HOPPER

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_equals_the_model():
    page = (DOCS / "reference" / predictions.PAGE.name).read_text(encoding="utf-8")
    assert page == predictions.page(), "run `python -m mlaforge.gpu_verification.predictions`"


def test_attention_takes_no_less_than_the_roof():
    """And a merge is predicted exactly if the launch has splits."""
    for (name, layout), S in ((item, S) for item in kernels.LAYOUTS.items() for S in (1, 64)):
        launch = predictions.attention_launch(layout, S, 8192, 1, torch.bfloat16, torch.bfloat16, HOPPER)
        times = predictions.attention_times(layout, S, 8192, 1, torch.bfloat16, torch.bfloat16, HOPPER)
        if times is not None:
            roof = kernels.cost(layout, S, 8192, 1, 2).bytes / 3.35e12
            assert sum(time.total for time in times) > roof, name
            assert len(times) == 1 + (launch.most_splits > 1), name


def test_expected_tiles_are_those_of_random_routing():
    generator, E, K, size, draws = random.Random(0), 8, 2, 16, 400
    total = 0
    for _ in range(draws):
        counts = [0] * E
        for _ in range(50):
            for expert in generator.sample(range(E), K):
                counts[expert] += 1
        total += sum(-(-count // size) for count in counts)
    assert predictions.expected_tiles(50, K, E, size) == pytest.approx(total / draws, rel=0.02)
    assert predictions.expected_tiles(1, 4, 32, 16) == 4
    assert predictions.expected_tiles(33, 4, 4, 16) == 12
