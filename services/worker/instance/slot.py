"""The worker's one place for an instance, and who is told when the instance in it changes, is loaded, or goes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from services.worker.instance.instance import Instance


class InstanceSlot:
    """Event loop only. Listeners are called in the order in which they came."""

    def __init__(self) -> None:
        self._instance: Instance | None = None
        self._on_changed: list[Callable[[], None]] = []
        self._on_loaded: list[Callable[[Instance], None]] = []
        self._before_gone: list[Callable[[Instance, str], Awaitable[None]]] = []

    def current(self) -> Instance | None:
        """The instance, if there is one."""
        return self._instance

    # --- for those who want to know ----------------------------------------------------------

    def when_changed(self, listener: Callable[[], None]) -> None:
        """Called when the instance's state changed, and when one came or went."""
        self._on_changed.append(listener)

    def when_loaded(self, listener: Callable[[Instance], None]) -> None:
        """Called once an instance has all its weights."""
        self._on_loaded.append(listener)

    def before_gone(self, listener: Callable[[Instance, str], Awaitable[None]]) -> None:
        """Called with an instance, and the reason, before its engine is stopped; waited for."""
        self._before_gone.append(listener)

    # --- for who loads and drains ------------------------------------------------------------

    def put(self, instance: Instance) -> None:
        """An instance begins to load."""
        self._instance = instance
        self.changed()

    def changed(self) -> None:
        """The instance's state changed."""
        for listener in self._on_changed:
            listener()

    def loaded(self, instance: Instance) -> None:
        """The instance has all its weights."""
        for listener in self._on_loaded:
            listener(instance)

    async def going(self, instance: Instance, reason: str) -> None:
        """The instance's engine is about to stop."""
        for listener in self._before_gone:
            await listener(instance, reason)

    def clear(self) -> None:
        """The instance is gone."""
        self._instance = None
        self.changed()
