"""Draws numbers as bars, curves and maps, and saves the files."""
