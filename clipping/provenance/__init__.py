"""Track tensors made of parameters, and the sample that each row of an activation belongs to."""
