"""Writes, reads and compares records on disk, and records where and under which conditions they were measured.

Functions take:
    text: any, or as typed.
    source, folder, path: a folder or a file of records; a folder; a file.
    data: the content of a file.
    a, b: of two sides.
    warn: receives warnings.
    records: any records, in the order of their files.
    environment: of a run.
    device: "cpu" or "cuda".
    left_out: reason -> number of records left out; changed in place.
    trial: the trial to measure.
    series: round -> samples.
"""
