"""Checks that a backend is exact on a model, and that samples do not mix."""
