"""A model that is spread over several processes."""
