"""What is to be measured does not run on this machine."""

from __future__ import annotations

from clipping import UnsupportedModel


class NotHere(UnsupportedModel):
    """What is to be measured does not run on this machine, whatever the model: such a trial ends `unsupported`."""

    def __init__(self, reason: str) -> None:
        super().__init__("", [])
        self.args = (reason,)
