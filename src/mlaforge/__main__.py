"""`python -m mlaforge` is the `mlaforge` command."""

from mlaforge.cli.main import main

main()
