"""A variable with its own value in each thread, so that one thread may capture or trace while another trains."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class PerThread(threading.local, Generic[T]):
    """A variable of each thread.

    Args:
        value: the initial value in every thread.

    Methods take:
        value: the new value in this thread.
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
