"""Measured losses: estimates from differences and divergences, and the curve through two points."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mlaforge.diagnosis.held_out import PRIOR_STD, SIZE_STD, Curve, Loss, TokenStatistics, estimates


def window_values(mean: float, spread: float, windows: int = 4, tokens: int = 1024) -> list[torch.Tensor]:
    return [mean + spread * torch.randn(tokens, dtype=torch.float64) for _ in range(windows)]


def estimate(differences: list[torch.Tensor], divergences: list[torch.Tensor]) -> Loss:
    return estimates({"one": TokenStatistics.of(differences, divergences)})["one"]


def test_estimates_are_weighted_by_precision() -> None:
    torch.manual_seed(0)
    # A difference with little variance dominates: the divergence may be off.
    sure = estimate(window_values(0.02, 0.001), window_values(0.03, 0.001))
    assert sure.nats == pytest.approx(0.02, rel=0.02)
    # One with a large variance does not.
    unsure = estimate(window_values(0.02, 10.0), window_values(0.03, 0.001))
    assert unsure.nats == pytest.approx(0.03, rel=0.2)
    assert sure.interval is not None and unsure.interval is not None
    assert unsure.interval[1] - unsure.interval[0] > sure.interval[1] - sure.interval[0]
    # 4 windows of 8 blocks: 95 % of a normal is 1.96 deviations to each side, of Student's t a little more.
    doubt = math.hypot(PRIOR_STD, SIZE_STD)
    assert unsure.interval[1] - unsure.nats == pytest.approx(2.04 * doubt * 0.03, rel=0.2)


def test_the_common_factor_comes_from_large_losses() -> None:
    """The factor of a conversion with a noisy difference is taken from the others."""
    torch.manual_seed(0)
    statistics = {
        "much": TokenStatistics.of(window_values(0.20, 0.02), window_values(0.40, 0.02)),
        "little": TokenStatistics.of(window_values(0.01, 10.0), window_values(0.02, 0.001)),
    }
    losses = estimates(statistics)
    assert losses["little"].nats == pytest.approx(0.01, rel=0.1)
    assert estimates({"little": statistics["little"]})["little"].nats == pytest.approx(0.02, rel=0.3)
    (low, high), alone = losses["little"].interval, estimates({"little": statistics["little"]})["little"].interval
    assert high - low < 0.5 * (alone[1] - alone[0])


def test_no_interval_for_too_little_text() -> None:
    torch.manual_seed(0)
    assert estimate(window_values(0.02, 0.1, 1, 100), window_values(0.03, 0.01, 1, 100)).interval is None
    short = estimate(window_values(0.02, 0.1, 3, 100), window_values(0.03, 0.01, 3, 100))
    assert short.interval is None and 0.0 < short.nats < 0.05
    # No loss in any token.
    assert estimate([torch.zeros(600)] * 2, [torch.zeros(600)] * 2).nats == 0.0


def test_the_curve_passes_through_the_measured_points() -> None:
    curve = Curve(((0.001, Loss(0.004, (0.003, 0.005))), (0.01, Loss(0.08, (0.07, 0.09)))))
    assert curve.at(0.001) == Loss(0.004, (0.003, 0.005)) and curve.at(0.01).nats == 0.08
    # Power law: 20 times the loss for 10 times the first-order one.
    assert curve.at(0.1).nats == pytest.approx(0.08 * 20)
    middle = curve.at(math.sqrt(0.001 * 0.01))
    assert middle.nats == pytest.approx(math.sqrt(0.004 * 0.08))
    assert middle.interval is not None and middle.interval[0] < middle.nats < middle.interval[1]
    assert curve.at(0.0) == Loss(0.0, None)
    # Proportional through one point.
    assert Curve(((0.01, Loss(0.03, None)),)).at(0.02) == Loss(pytest.approx(0.06), None)


@given(st.floats(1e-6, 1.0), st.floats(1e-6, 1.0), st.lists(st.floats(1e-9, 1.0), min_size=2, max_size=6))
def test_loss_is_monotonic_in_first_order_loss(a: float, b: float, at: list[float]) -> None:
    class Sized:
        def __init__(self, first_order: float):
            self.first_order = first_order

    sizes = {"wide": Sized(0.001), "narrow": Sized(0.02)}
    curve = Curve.fit(sizes, {"wide": Loss(a, None), "narrow": Loss(b, None)})
    losses = [curve.at(first_order).nats for first_order in sorted(at)]
    assert all(more >= less * (1 - 1e-9) for less, more in itertools.pairwise(losses))
