"""Executes experiments: what remains, in which order, on which machine, within the time, and recorded.

Any function raises a `UsageError` for what a person typed and cannot be, before anything is measured.

Functions take:
    request, plan, device: what to run; the same on a device, with its records; "cpu" or "cuda".
    trial, trials, run: a trial, or several; one in a round.
    block: the part of the plan that a trial belongs to.
    timeout: seconds; None to wait for an answer.
    running: runs that have not ended.
    answer, record: how a trial ended; its line in a file.
    history: the records that count.
    where: the environment of a run, as recorded.
    sweep, cluster: what runs on several machines share, as recorded; the requested resources.
    progress, say: receive each trial; a line for the person.
"""
