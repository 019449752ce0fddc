"""The tape: records every operation of a forward pass that uses a trainable parameter."""
