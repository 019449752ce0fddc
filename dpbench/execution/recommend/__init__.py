"""Recommend a backend for one model on this machine, in a minute: `dpbench recommend`.

==========  =======================================================================
`agenda`    what to measure, in which order, within the time; no torch
`findings`  the results for each backend, and the rows to print
`verdict`   the recommendation and its reason: a pure function of the findings
==========  =======================================================================
"""
