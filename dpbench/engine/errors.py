"""The engine's error and warning: one line that says what was expected, what came, what to do."""


class Misuse(RuntimeError):
    """The engine was used in a way that gives no gradient, a wrong one, or one that is not private."""


class PrivacyWarning(UserWarning):
    """Training continues, but its privacy may be less than it seems."""
