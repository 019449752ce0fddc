"""The tape: records every operation of a forward pass that uses a trainable parameter.

Functions take:
    tape, use, uses: of a forward pass; a use that it recorded, or several.
    source, tensor: made of parameters alone.
    rows, owners: the number of rows of the batch; the index of the sample, or `NOBODY`, of each row.
"""
