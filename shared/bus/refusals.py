"""What a NATS server refuses this connection: it says so beside the replies, never as one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Iterator
from typing import Literal

from shared.errors import NotPermitted

_log = logging.getLogger(__name__)

Act = Literal["publish", "subscription"]
JETSTREAM = "$js.api"
"""Watch this to hear of any refusal of JetStream's own subjects."""
_REFUSED = re.compile(r"permissions violation for (publish|subscription) to \"([^\"]+)\"", re.IGNORECASE)
_INBOX = "_inbox."
_MAX_LOGGED = 256


class RefusalWatch:
    """Whether one act was refused."""

    def __init__(self) -> None:
        self.subject = ""
        self._limit: asyncio.Timeout | None = None

    def ends(self, limit: asyncio.Timeout) -> None:
        """A refusal makes this time-out expire at once: nothing else will come."""
        self._limit = limit
        if self.subject:
            self.say(self.subject)

    def say(self, subject: str) -> None:
        """It was."""
        self.subject = subject
        if self._limit is not None:
            with contextlib.suppress(RuntimeError):  # it ended in the same moment
                self._limit.reschedule(asyncio.get_running_loop().time())

    def check(self, what: str, user: str) -> None:
        """Raise ``NotPermitted`` if it was."""
        if self.subject:
            who = f"user {user!r}" if user else "a client without credentials"
            if self.subject.startswith(_INBOX):
                answers = f"NATS does not permit {who} to hear answers on {self.subject}"
                raise NotPermitted(f"{answers}: these are the credentials of another kind of service")
            raise NotPermitted(f"NATS does not permit {who} to {what} (refused: {self.subject})")


class AccessRefusals:
    """Those of one connection, told to whoever waits, and to the log once each."""

    def __init__(self, user: str) -> None:
        self.user = user
        self._watching: dict[tuple[str, str], list[RefusalWatch]] = {}
        self._logged: set[tuple[str, str]] = set()
        self._deaf = ""
        """The inbox on which no answer can arrive, whatever is asked."""

    @contextlib.contextmanager
    def watch(self, act: Act, subject: str) -> Iterator[RefusalWatch]:
        """Hear of a refusal of ``act`` on ``subject`` while inside."""
        # The client library gives the server's words in lower case.
        key, refused = (act, subject.lower()), RefusalWatch()
        self._watching.setdefault(key, []).append(refused)
        if self._deaf:
            refused.say(self._deaf)
        try:
            yield refused
        finally:
            watching = self._watching[key]
            watching.remove(refused)
            if not watching:
                del self._watching[key]

    def take(self, words: str) -> bool:
        """The server said something; whether it was a refusal."""
        found = _REFUSED.search(words)
        if found is None:
            return False
        act, subject = found[1].lower(), found[2].lower()
        keys = [(act, subject)] + ([(act, JETSTREAM)] if subject.startswith(JETSTREAM) else [])
        if act == "subscription" and subject.startswith(_INBOX):
            self._deaf = subject
            keys = list(self._watching)
        for key in keys:
            for refused in self._watching.get(key, ()):
                refused.say(subject)
        if (act, subject) not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add((act, subject))
            verb = "publish on" if act == "publish" else "subscribe to"
            who = f"user {self.user!r}" if self.user else "a client without credentials"
            _log.error("NATS does not permit %s to %s %s (said once)", who, verb, subject)
        return True
