"""The attack on the product from outside: fuzzed requests, floods of connections, corrupted files, kills."""
