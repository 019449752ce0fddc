"""Rules: the per-sample gradient, norm and clipped sum of each operation that reads a parameter."""
