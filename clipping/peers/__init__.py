"""Other libraries behind the interface of our backends, one a module; each imports what it wraps."""
