"""Selects records and computes the numbers of figures: pairs, cells, published values, claims."""
