"""`generate --diffusion` prints what was drafted and verified, and generates what it generates without."""

import re
from types import SimpleNamespace

import pytest

from mlaforge.engine.speculation.block import BlockDrafter
from mlaforge.engine.speculation.drafter import Draft
from mlaforge.serving.diffusion import Diffusion
from support.block_heads import saved

OPTIONS = ("--prompt", "Once upon", "--max-new-tokens", 12, "--dtype", "float32", "--cache-bytes", 1 << 20,
           "--temperature", 0)  # fmt: skip


@pytest.mark.parametrize("steps", [1, 2])
def test_prints_each_step_of_a_block(steps, cli, tiny_models, tmp_path):
    head = saved(tmp_path / "head", tokens=range(256))
    plain = cli("generate", tiny_models["llama"], *OPTIONS, "--speculative", head)
    diffusion = ("--diffusion", "--denoise-steps", steps)
    done = cli("generate", tiny_models["llama"], *OPTIONS, "--speculative", head, *diffusion)
    assert done.exit_code == 0 and "experimental" in done.stderr, done.stderr
    # The text, below the line with the speed.
    assert done.stdout.split("tokens]\n")[1] == plain.stdout.split("tokens]\n")[1]
    lines = [line for line in done.stdout.splitlines() if re.match(r"(masked|filled|pass|verified) ", line)]
    rows = [line.split(None, 1) for line in lines]
    names = [name for name, _ in rows]
    cycle = ["masked", "filled", *(["pass"] * (steps - 1)), "verified"]
    assert len(rows) >= 2 * len(cycle) and names[: len(cycle)] * (len(names) // len(cycle)) == names
    masked, verified = rows[0][1], rows[len(cycle) - 1][1]
    assert set(masked) == {"░", "|"} and masked.count("░") == 4
    assert re.search(r"\[\+.*\+\]$", verified)


def test_shows_what_prompt_lookup_changes():
    """Not where the head has only ended its draft."""
    speculation, rows = SimpleNamespace(drafter=object.__new__(BlockDrafter)), []
    llm = SimpleNamespace(
        engine=SimpleNamespace(speculation=speculation), tokenizer=SimpleNamespace(decode=lambda ids: str(ids[0]))
    )
    diffusion = Diffusion(llm, 1, lambda name, places: rows.append((name, [text for text, _ in places])))
    sequence = SimpleNamespace(token_ids=[9])
    for draft in (Draft([1, 2]), Draft([1, 5, 3])):
        diffusion.filled(sequence, [1, 2, 3])
        diffusion.verified(sequence, draft, 1)
    unchanged = [("masked", ["░"] * 3), ("filled", ["1", "2", "3"])]
    assert rows == [
        *unchanged, ("verified", ["1", "2", "9"]), *unchanged, ("looked up", ["1", "5", "3"]),
        ("verified", ["1", "5", "9"]),
    ]  # fmt: skip


def test_needs_a_block_head(refused, tiny_models):
    refused("block head", "generate", tiny_models["llama"], *OPTIONS, "--speculative", "ngram", "--diffusion")
