"""Clips a model that is spread over several processes."""
