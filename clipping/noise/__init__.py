"""Noise from a cipher, added to sums: in C, by Triton, or by torch's operations."""
