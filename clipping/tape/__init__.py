"""The tape: every use of a trainable parameter in a forward pass, recorded at the level of operations."""
