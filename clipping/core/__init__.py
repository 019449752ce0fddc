"""The reference definition of a clipped sum, and the types that all other modules use."""
