"""What goes wrong in the hands of a user of the engine: one line that says what was expected, what came, what to do."""

from __future__ import annotations


class Misuse(RuntimeError):
    """The engine was used in a way that would give no gradient, a wrong one, or one that is not private."""


class PrivacyWarning(UserWarning):
    """Training goes on, but what it buys is not what it may seem to."""
