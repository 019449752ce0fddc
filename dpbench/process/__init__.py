"""Runs trials in their own processes: forked from a server with torch imported, watched, and killed."""
