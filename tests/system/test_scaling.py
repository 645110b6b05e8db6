"""docs/scaling.md equals the output of its command, which follows from the sizes of the models."""

from pathlib import Path

from benchmarks import scaling

ROOT = Path(__file__).parents[2]


def test_the_tables_equal_the_commands_output():
    documented = [line for line in (ROOT / "docs" / "scaling.md").read_text().splitlines() if line.startswith("| ")]
    assert [line for line in documented if line in set(scaling.lines())] == list(scaling.lines())


def test_bytes_of_a_request():
    """By hand: 18 full layers of 32K tokens and 18 of 128; 1,024 numbers a layer, 576 in a converted one; bf16."""
    full, sliding = 18 * 32768 * 2, 18 * 128 * 2
    raw = scaling.MODELS["120B"]
    for ranks in (1, 2, 8):
        assert scaling.cache_bytes(raw, "GQA", 32768, ranks) == (full + sliding) * 1024 // ranks
        assert scaling.cache_bytes(raw, "converted", 32768, ranks) == full * 576 + sliding * 1024 // ranks
