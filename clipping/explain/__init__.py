"""What a plan does with each use of each parameter, in words and numbers."""
