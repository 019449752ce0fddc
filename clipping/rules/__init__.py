"""The per-sample gradients of each operation that reads a parameter, and the ways to their norms and sums."""
