"""Writes, reads and compares records on disk, and records where and under which conditions they were measured.

Functions take:
    records: any records, in the order of their files.
    environment: of a run.
    device: "cpu" or "cuda".
    left_out: reason -> number of records left out; changed in place.
    trial: the trial to measure.
    series: round -> samples.
"""
