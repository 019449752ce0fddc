"""Noise from the ChaCha20 cipher, added to sums: in C, by Triton, or by torch's operations.

Functions take:
    key, nonce: of the cipher: 32 bytes, and three words of 32 bits.
"""
