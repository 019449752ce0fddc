"""A run: what is asked for, what of it remains, in which order and where it is measured."""
