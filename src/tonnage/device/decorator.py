"""The base of all decorators: a driver around any driver, in any order and depth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tonnage.device.driver import Driver

Call = Callable[..., Any]

#: Every call of the seam, by name: what a decorator may step in front of. The properties are not calls.
CALLS = frozenset(
    name for name, one in vars(Driver).items() if not name.startswith("_") and not isinstance(one, property)
)


class DriverDecorator:
    """Has everything of the driver it wraps, its properties and its further methods too.

    A subclass says in ``_around`` what it puts in front of a call; what it makes is kept by name, so that a call
    costs one function more. Attributes that the subclass does not declare are set on the wrapped driver.
    """

    wrapped: Driver

    def __init__(self, driver: Driver) -> None:
        self.wrapped = driver

    def __repr__(self) -> str:
        return f"<{type(self).__name__} over {self.wrapped!r}>"

    def _around(self, call: str) -> Call | None:
        """What is called in place of ``call`` of the wrapped driver; None to leave it alone."""
        raise NotImplementedError

    def _forget(self) -> None:
        """Ask ``_around`` again, for every call."""
        for name in CALLS & self.__dict__.keys():
            del self.__dict__[name]

    # Only for names that this object does not have: what ``_around`` made is found before.
    def __getattr__(self, name: str) -> Any:
        if name == "wrapped":  # not set yet: an unpickled or half-made object
            raise AttributeError(name)
        made = self._around(name) if name in CALLS else None
        if made is None:
            return getattr(self.wrapped, name)
        # Checked before it is kept, so that a call which the wrapped driver lacks is an AttributeError here too.
        getattr(self.wrapped, name)
        self.__dict__[name] = made
        return made

    def __setattr__(self, name: str, value: object) -> None:
        if self._owns(name) or not hasattr(self.wrapped, name) or callable(getattr(self.wrapped, name)):
            object.__setattr__(self, name, value)
        else:
            setattr(self.wrapped, name, value)

    def _owns(self, name: str) -> bool:
        return (
            name.startswith("_")
            or name in self.__dict__
            or any(name in vars(one).get("__annotations__", ()) for one in type(self).__mro__)
        )
