"""Drafted tokens: who drafts, how a step verifies them, how many pay."""
