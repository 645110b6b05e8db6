"""docs/scaling.md equals the output of its command, which follows from the sizes of the models."""

from pathlib import Path

from benchmarks import scaling
from mlaforge.planning.ranks import Ranks

ROOT = Path(__file__).parents[2]


def test_the_tables_equal_the_commands_output():
    documented = [line for line in (ROOT / "docs" / "scaling.md").read_text().splitlines() if line.startswith("| ")]
    lines = list(scaling.lines())
    assert [line for line in documented if line in set(lines)] == lines


def test_bytes_of_a_request():
    """By hand: 18 full layers of 32K tokens and 18 of 128; 1,024 numbers a layer, 576 in a converted one; bf16."""
    full, sliding = 18 * 32768 * 2, 18 * 128 * 2
    for n, m in ((1, 1), (2, 1), (8, 1), (8, 8), (8, 2)):
        gqa, converted = (
            scaling.row("120B", form, Ranks(n, m)).cache_bytes(1) for form in ("GQA", "`latent_rope` 512 + 64")
        )
        assert gqa == (full + sliding) * 1024 // n
        assert converted == full * 576 // m + sliding * 1024 // n
