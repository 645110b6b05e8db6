"""Paged attention against a GPU's roof, as `mlaforge bench kernels` measures it, into one file.

    python benchmarks/kernels.py [--roof h200] [--implementation triton] [--out benchmarks/kernels]
    python benchmarks/kernels.py --device cpu --implementation reference --small

Writes OUT/kernels.json. The grid, the comparison with the reference and the timing are src/mlaforge/bench/kernels.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mlaforge.bench import kernels
from mlaforge.bench.config import BenchConfig
from mlaforge.config import resolve


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--roof", default="auto")
    arguments.add_argument("--device", default="cuda")
    arguments.add_argument("--dtype", default="bfloat16")
    arguments.add_argument("--implementation")
    arguments.add_argument("--small", action="store_true", help="a few tiny steps")
    arguments.add_argument("--out", type=Path, default=Path("benchmarks/kernels"))
    given = vars(arguments.parse_args())
    out, small = given.pop("out"), given.pop("small")
    print(kernels.table(kernels.run(resolve(BenchConfig, None, **given), out, "small" if small else None)))


if __name__ == "__main__":
    main()
