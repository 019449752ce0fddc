"""The tape: records every operation of a forward pass that uses a trainable parameter.

Functions take:
    uses: that the tape recorded.
    tensor: made of parameters alone.
    arrival: called with a use and the gradient g, of the shape of the use's output.
    dims: number of dimensions.
    rows, owners: the number of rows of the batch; the index of the sample, or `NOBODY`, of each row.
"""
