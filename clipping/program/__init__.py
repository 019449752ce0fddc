"""A step as one program: captured, traced, compared, and then only run."""
