"""Which backend to take for one model on this machine, in a minute: `dpbench recommend`.

==========  ==================================================================================
`agenda`    what is measured, in which order, as the time allows; the parent's side, no torch
`findings`  what was found of each backend, and the rows that are printed
`verdict`   which one to take, and why, in a sentence: a pure function of the findings
==========  ==================================================================================
"""
