"""Balancing policies: pure functions of what is known. Standard library only."""
