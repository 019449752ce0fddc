"""Kernels that save time or memory and compute the same results as the formulas of `clipping.rules`."""
