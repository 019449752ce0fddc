"""Adapters of other libraries, one a module; each imports the library that it wraps."""
