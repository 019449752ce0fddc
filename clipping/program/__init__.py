"""Capture and trace the private step as a graph, compare it with the eager step, and run it."""
