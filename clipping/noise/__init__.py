"""Noise from the ChaCha20 cipher, added to sums: in C, by Triton, or by torch's operations."""
