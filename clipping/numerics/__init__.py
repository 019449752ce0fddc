"""Sums, products and norms of many samples at once, and how far they are rounded."""
