"""Executes experiments: what remains, in which order, on which machine, within the time, and recorded.

Any function raises a `UsageError` for what a person typed and cannot be, before anything is measured.

Functions take:
    request, device: what to run; "cpu" or "cuda".
    trial, trials, run: a trial, or several; one in a round.
    one, other, cell, cells: two trials; a trial or a search, or several.
    name, names, experiment: of an experiment or executor; of backends; an experiment's name.
    rounds: how often a trial runs.
    folder, results: of an experiment's records; of all experiments.
    only: field -> its selected values.
    fingerprint: of a trial on this machine.
    libraries, versions: name -> version; missing ones are this machine's.
    state: of a search.
    line: for the person, without its end.
    block: the part of the plan that a trial belongs to.
    timeout: seconds; None to wait for an answer.
    running: runs that have not ended.
    answer, record: how a trial ended; its line in a file.
    history: the records that count.
    where: the environment of a run, as recorded.
    sweep, cluster: what runs on several machines share, as recorded; the requested resources.
    progress, say: receive each trial; a line for the person.
"""
