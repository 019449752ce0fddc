"""The definition: what a clipped sum is, one sample at a time, and the types that everything else speaks in."""
