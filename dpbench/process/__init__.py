"""Runs trials in their own processes: forked from a server with torch imported, watched, and killed.

Functions take:
    trial: to run.
    pid, parent, leader: the number of a process; of its parent; of the first of its group or session.
    signum: a signal.
    timeout: seconds; None: until there is something.
    cpus: their numbers; None for all.
"""
