"""Reads a gateway's feed for as long as somebody looks, and connects again after a break."""

from __future__ import annotations

import asyncio
import itertools
from typing import NoReturn

from compose.admin import AdminClient, GatewayUnreachable
from compose.feed import EventSplitter, FeedBroken, ShownState
from shared.errors import BlitzError, Unauthorized

RETRY_S = (0.5, 1.0, 2.0, 5.0)
"""Pauses after so many attempts in a row that brought nothing; the last one stays."""


class FeedReader:
    """``feed`` is the newest state, and stays when the connection is lost. Belongs to one event loop."""

    def __init__(self, client: AdminClient) -> None:
        self.feed = ShownState()
        self.lost = ""
        """Why nothing is read now; empty: the feed is live."""
        self.fresh = asyncio.Event()
        """Set where ``feed`` or ``lost`` has changed; for the reader's owner to clear."""
        self._client = client
        self._failures = 0
        self._anew = False
        """The last event made no sense: the next connection begins with a snapshot."""

    async def read(self) -> None:
        """Until the feed ends. Raises the gateway's ``BlitzError``, and ``GatewayUnreachable`` when it breaks off."""
        splitter = EventSplitter()
        async with self._client.events("" if self._anew else self.feed.last_id) as pieces:
            self.lost = ""
            self.fresh.set()
            try:
                async for piece in pieces:
                    for event in splitter.feed(piece):
                        if self.feed.take(event):
                            self._failures, self._anew = 0, False
                            self.fresh.set()
            except FeedBroken:
                self._anew = True
                raise
        raise GatewayUnreachable("the gateway ended the feed")

    async def keep_reading(self) -> NoReturn:
        """Until cancelled. Raises the first attempt's ``BlitzError``, and ``Unauthorized`` of every one."""
        for attempt in itertools.count():
            try:
                await self.read()
            except Unauthorized:
                raise
            except BlitzError as error:
                if not attempt and self.feed.is_empty:
                    raise
                self.lost = error.message
                self.fresh.set()
            await asyncio.sleep(RETRY_S[min(self._failures, len(RETRY_S) - 1)])
            self._failures += 1
        raise AssertionError
