"""Turns the gradients of a backward pass into norms, factors and the clipped sum."""
