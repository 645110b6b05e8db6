"""Losses by measurement: estimates from two sources, and the curve through two sizes."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mlaforge.diagnosis.held_out import DOUBT, PRIOR, Curve, Loss, Seen, estimates


def drawn(mean: float, spread: float, windows: int = 4, tokens: int = 1024) -> list[torch.Tensor]:
    return [mean + spread * torch.randn(tokens, dtype=torch.float64) for _ in range(windows)]


def estimate(differences: list[torch.Tensor], divergences: list[torch.Tensor]) -> Loss:
    return estimates({"one": Seen.of(differences, divergences)})["one"]


def test_the_surer_estimate_counts_more() -> None:
    torch.manual_seed(0)
    # A difference that varies little is believed: the divergence may be off.
    sure = estimate(drawn(0.02, 0.001), drawn(0.03, 0.001))
    assert sure.nats == pytest.approx(0.02, rel=0.02)
    # One that varies a lot is not.
    unsure = estimate(drawn(0.02, 10.0), drawn(0.03, 0.001))
    assert unsure.nats == pytest.approx(0.03, rel=0.2)
    assert sure.interval is not None and unsure.interval is not None
    assert unsure.interval[1] - unsure.interval[0] > sure.interval[1] - sure.interval[0]
    # 4 windows of 8 blocks: 95 % of a normal is 1.96 deviations to each side, of Student's t a little more.
    doubt = math.hypot(PRIOR, DOUBT)
    assert unsure.interval[1] - unsure.nats == pytest.approx(2.04 * doubt * 0.03, rel=0.2)


def test_what_much_loses_says_how_far_divergence_is_off() -> None:
    """A size whose own difference is drowned in noise is told by the others."""
    torch.manual_seed(0)
    seen = {
        "much": Seen.of(drawn(0.20, 0.02), drawn(0.40, 0.02)),
        "little": Seen.of(drawn(0.01, 10.0), drawn(0.02, 0.001)),
    }
    found = estimates(seen)
    assert found["little"].nats == pytest.approx(0.01, rel=0.1)
    assert estimates({"little": seen["little"]})["little"].nats == pytest.approx(0.02, rel=0.3)
    (low, high), alone = found["little"].interval, estimates({"little": seen["little"]})["little"].interval
    assert high - low < 0.5 * (alone[1] - alone[0])


def test_too_little_text_has_no_interval() -> None:
    torch.manual_seed(0)
    assert estimate(drawn(0.02, 0.1, 1, 100), drawn(0.03, 0.01, 1, 100)).interval is None
    few = estimate(drawn(0.02, 0.1, 3, 100), drawn(0.03, 0.01, 3, 100))
    assert few.interval is None and 0.0 < few.nats < 0.05
    # What is lost nowhere is nothing.
    assert estimate([torch.zeros(600)] * 2, [torch.zeros(600)] * 2).nats == 0.0


def test_the_curve_goes_through_what_was_measured() -> None:
    curve = Curve(((0.001, Loss(0.004, (0.003, 0.005))), (0.01, Loss(0.08, (0.07, 0.09)))))
    assert curve.at(0.001) == Loss(0.004, (0.003, 0.005)) and curve.at(0.01).nats == 0.08
    # A power: 20 times the loss for 10 times the first-order one.
    assert curve.at(0.1).nats == pytest.approx(0.08 * 20)
    middle = curve.at(math.sqrt(0.001 * 0.01))
    assert middle.nats == pytest.approx(math.sqrt(0.004 * 0.08))
    assert middle.interval is not None and middle.interval[0] < middle.nats < middle.interval[1]
    assert curve.at(0.0) == Loss(0.0, None)
    # Of one point a proportion.
    assert Curve(((0.01, Loss(0.03, None)),)).at(0.02) == Loss(pytest.approx(0.06), None)


@given(st.floats(1e-6, 1.0), st.floats(1e-6, 1.0), st.lists(st.floats(1e-9, 1.0), min_size=2, max_size=6))
def test_less_is_never_lost_with_more_first_order_loss(a: float, b: float, at: list[float]) -> None:
    class Sized:
        def __init__(self, first_order: float):
            self.first_order = first_order

    sizes = {"wide": Sized(0.001), "narrow": Sized(0.02)}
    curve = Curve.through(sizes, {"wide": Loss(a, None), "narrow": Loss(b, None)})
    losses = [curve.at(first_order).nats for first_order in sorted(at)]
    assert all(more >= less * (1 - 1e-9) for less, more in itertools.pairwise(losses))
