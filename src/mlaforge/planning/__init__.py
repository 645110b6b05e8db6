"""Cost estimates before conversion: cache bytes and FLOPs, rooflines of machines, and plan files."""
