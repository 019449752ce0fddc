"""What the tensors of a forward pass are made of: parameters, and rows of samples."""
