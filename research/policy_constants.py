"""What the constants of the speculation policy are worth, in a simulation.

    python -m research.policy_constants [--steps 3000] [--seeds 8]

The policy chooses among chains, trees and sparse views for one sequence. A step of r rows takes 1 + c (r - 1) plain
steps, times log-normal noise of 5 %, three times as long in one step of a hundred. Texts of 300 steps alternate between
acceptance probabilities of 0.3 to 0.9; in half of them a sparse view makes five tokens in 1.6 plain steps, in the
others two. A score is tokens per second relative to the best fixed choice of each text, the mean over costs c of 0.02,
0.15 and 0.5. Printed is the score for each constant at half, at its value, and at twice its value.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence as Items
from types import SimpleNamespace
from typing import Any

from mlaforge.engine.request.sequence import Sequence
from mlaforge.engine.speculation import drafter as drafters
from mlaforge.engine.speculation import policy as policies
from mlaforge.engine.speculation.drafter import Draft, Drafter
from mlaforge.rendering.table import markdown_table

MAX_TOKENS, TREE, TEXT_STEPS = 4, 12, 300
CONSTANTS = {
    policies: (
        "TIME_WEIGHT",
        "FIRST_STEPS",
        "EXPLORE_EVERY",
        "FIRST_RETRY_TOKENS",
        "RETRY_TOKENS",
        "EARLIER_TOKENS",
        "HALF_LIFE_TOKENS",
    ),
    drafters: ("PRIOR", "PRIOR_DRAFTS", "ACCEPTANCE_WEIGHT"),
}


class Mode(Drafter):
    """A mode that proposes nothing: the simulation draws what is accepted."""

    def __init__(self, name: str):
        self.name = name

    def propose(self, budgets: Items[tuple[Sequence, int]], min_probability: float) -> list[Draft | None]:
        raise AssertionError("the simulation proposes nothing")


def chain(accepts: float, count: int) -> float:
    """Expected tokens of a step with a chain of `count` tokens."""
    return sum(accepts**j for j in range(count + 1))


def branched(accepts: float) -> float:
    """Acceptance of a place of a tree: the likeliest token or one of its siblings."""
    return 1 - (1 - accepts) ** 1.6


def best_rate(cost: float, accepts: float, sparse: tuple[float, float]) -> float:
    """Tokens per plain step of the best fixed choice."""
    rates = [chain(accepts, k) / (1 + cost * k) for k in range(MAX_TOKENS + 1)]
    return max(*rates, chain(branched(accepts), MAX_TOKENS) / (1 + cost * TREE), sparse[0] / sparse[1])


def score(cost: float, steps: int, seed: int) -> float:
    """Tokens per second of the policy, relative to the best fixed choices."""
    chance = random.Random(seed)
    modes = [Mode("chain"), Mode("tree"), Mode("sparse view")]
    policy = policies.Policy(modes, MAX_TOKENS, adaptive=True)
    tokens, seconds, best = 0.0, 0.0, 0.0
    for step in range(steps):
        if step % TEXT_STEPS == 0:
            accepts, sparse = chance.uniform(0.3, 0.9), chance.choice([(5, 1.6), (2, 1.6)])
        # What the policy reads of a running sequence.
        sequence: Any = SimpleNamespace(decoding=True, computed=5000, number=step // TEXT_STEPS)
        decision = policy.decide([sequence], waiting=False)
        count = decision.length
        probability = branched(accepts) if decision.drafter is modes[1] else accepts
        accepted = next((j for j in range(count) if chance.random() >= probability), count)
        drafted, took = 1 + accepted, 1 + cost * (TREE if decision.drafter is modes[1] else count)
        if decision.drafter is modes[2]:
            drafted, took = sparse[0] + chance.choice([-1, 0, 1]), sparse[1]
        took *= chance.lognormvariate(0, 0.05) * (3 if chance.random() < 0.01 else 1)
        if decision.drafter is modes[0]:
            modes[0].acceptance.record(count, accepted)
        policy.record(decision, drafted, 1 + count, took)
        tokens, seconds = tokens + drafted, seconds + took
        best += took * best_rate(cost, accepts, sparse)
    return tokens / best


def mean_score(steps: int, seeds: int) -> float:
    return statistics.mean(score(cost, steps, seed) for cost in (0.02, 0.15, 0.5) for seed in range(seeds))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=3000)
    arguments.add_argument("--seeds", type=int, default=8)
    options = arguments.parse_args()
    rows = [("constant", "value", "at half", "at its value", "at twice")]
    middle = mean_score(options.steps, options.seeds)
    for module, names in CONSTANTS.items():
        for name in names:
            value = getattr(module, name)
            scores = []
            for factor in (0.5, 2):
                setattr(module, name, min(0.95, value * factor) if value < 1 else max(1, int(value * factor)))
                scores.append(mean_score(options.steps, options.seeds))
                setattr(module, name, value)
            rows.append((name, f"{value:g}", f"{scores[0]:.3f}", f"{middle:.3f}", f"{scores[1]:.3f}"))
    print(markdown_table(rows))


if __name__ == "__main__":
    main()
