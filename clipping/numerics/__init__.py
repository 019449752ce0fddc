"""Batched sums, products and norms, and bounds on their rounding errors."""
