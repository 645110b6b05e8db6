"""`python -m mlaforge` is the `mlaforge` command."""

from mlaforge.cli import main

main()
