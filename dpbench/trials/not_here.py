"""The exception of a measurement that cannot run on this machine."""

from clipping import UnsupportedModel


class NotHere(UnsupportedModel):
    """The measurement cannot run on this machine, whatever the model: the trial ends `unsupported`."""

    def __init__(self, reason: str) -> None:
        super().__init__("", [])
        self.args = (reason,)
