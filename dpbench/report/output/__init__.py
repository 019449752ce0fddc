"""Writes a report: tables, the page of all figures, their files."""
