"""Trials in processes of their own: forked from a server that has torch imported, watched, killed, answered for."""
