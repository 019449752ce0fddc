"""From the gradients that arrive in a backward pass to norms, factors and the clipped sum."""
