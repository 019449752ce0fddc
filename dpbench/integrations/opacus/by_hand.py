"""Refuse the constructors of the classes that `make_private` returns."""

from typing import Any, Self

from dpbench.engine import Misuse


class ByEngine:
    """Base of a class whose instances come from `make_private` alone.

    `of_engine` takes the arguments of the subclass's `_begin`, which initialises an instance.
    """

    _begin: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        raise Misuse(
            "expected PrivacyEngine().make_private(module=..., optimizer=..., data_loader=...), got "
            f"{type(self).__name__} made by hand: ε depends on the number of records and on how batches are drawn"
        )

    @classmethod
    def of_engine(cls, *args: Any) -> Self:
        """Make an instance.

        Args:
            args: of `_begin`.
        """
        made = cls.__new__(cls)
        made._begin(*args)
        return made
