"""The baked distance of prefetching is the best of its own measurement."""

import json
import re

from benchmarks.prefetch import AHEAD, mean_us
from benchmarks.script import ROOT
from mlaforge.ops.kernel_library import FOLDER


def test_the_default_is_within_three_percent_of_the_best_of_its_own_file():
    header = (FOLDER / "linear" / "byte_weights.h").read_text()
    assert "benchmarks/kernels.json" in header
    tiles, tile_bytes = re.search(r"BYTES_AHEAD = (\d+) \* TILE_BYTES;\n#else", header), 1024
    assert tiles and f"TILE_BYTES = {tile_bytes};" in header
    rows = json.loads((ROOT / "benchmarks" / "kernels.json").read_text())["prefetch"]["rows"]
    means = [mean_us(rows, format) for format in ("int8", "int4")]
    # One constant serves both formats.
    by_ahead = {ahead: means[0][ahead] * means[1][ahead] for ahead in AHEAD}
    assert by_ahead[int(tiles[1]) * tile_bytes] <= 1.03**2 * min(by_ahead.values())
    assert by_ahead[int(tiles[1]) * tile_bytes] < 0.95**2 * by_ahead[2048]
