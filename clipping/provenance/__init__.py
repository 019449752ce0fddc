"""Track tensors made of parameters, and the sample that each row of an activation belongs to.

Functions take:
    condition: one boolean, or a function that computes it.
    owners: the owner of each row, [n] or more dimensions.
    gradient, gradients: of a source's tensor.
    count, counts: of rows or their owners.
    name, parameter: of the model.
"""
