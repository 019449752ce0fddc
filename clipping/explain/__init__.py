"""Explains what a plan does with each use of each parameter."""
