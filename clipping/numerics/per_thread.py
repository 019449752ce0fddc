"""A value that each thread has for itself: what one thread captures or traces is no concern of another that trains."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class PerThread(threading.local, Generic[T]):
    """A variable of each thread.

    Args:
        value: the first one, in every thread.

    Methods take:
        value: of this thread from now on.
    """

    def __init__(self, value: T) -> None:
        self.value = value

    @contextmanager
    def set(self, value: T) -> Iterator[T]:
        """Context in which this thread has another value; yields it."""
        before, self.value = self.value, value
        try:
            yield value
        finally:
            self.value = before
