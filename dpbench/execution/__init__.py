"""Runs an experiment: the request, what remains of it, the order, and where it is measured."""
