"""Kernels beneath the rules: in C for CPUs, in Triton for CUDA, and torch's own operations arranged."""
