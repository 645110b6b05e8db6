"""Paged attention against a GPU's roof, as `mlaforge bench kernels` measures it, into one file.

    python benchmarks/paged_kernels.py [--roof h200] [--implementation triton] [--out benchmarks/kernels]
    python benchmarks/paged_kernels.py --device cpu --implementation reference --small

Writes OUT/kernels.json. The grid, the comparison with the reference and the timing are src/mlaforge/bench/kernels.py.
"""

from __future__ import annotations

from rows import parser

from mlaforge.bench import kernels
from mlaforge.bench.config import BenchConfig
from mlaforge.config import resolve


def main() -> None:
    arguments = parser(__doc__, "benchmarks/kernels", data=False)
    arguments.add_argument("--roof", default="auto")
    arguments.add_argument("--device", default="cuda")
    arguments.add_argument("--dtype", default="bfloat16")
    arguments.add_argument("--implementation")
    arguments.add_argument("--small", action="store_true", help="a few tiny steps")
    options = vars(arguments.parse_args())
    out, small = options.pop("out"), options.pop("small")
    print(kernels.table(kernels.run(resolve(BenchConfig, None, **options), out, "small" if small else None)))


if __name__ == "__main__":
    main()
