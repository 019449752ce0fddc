"""The C kernels, compiled and loaded by `library`."""
