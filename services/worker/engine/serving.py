"""What an instance asks of the engine that computes its requests, whatever that is.

``EngineThread`` is one: an engine of ours, layer by layer, whose instances lend work, move KV and serve as they load.
An engine that is somebody else's process takes requests and gives tokens, and does none of these: its instances drain
by sending their requests back with what they have put out.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from services.worker.core.scheduling.gateways import Gone
from services.worker.core.scheduling.leaving import Moving
from services.worker.core.scheduling.schedule import SchedulerConfig
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.engine.loop import LoopStats
from shared.errors import BlitzError
from shared.messages.common import ErrorInfo
from shared.messages.destinations import SendBack


class ServingEngine(Protocol):
    """Any thread. Futures carry ``Unavailable`` once it has stopped. What requests put out goes to who was named
    when it was made."""

    @property
    def limits(self) -> SchedulerConfig:
        """What it takes; constant."""

    def prepare(self) -> None:
        """Begin to have ready what the first requests will use, while the weights come."""

    def start(self) -> None:
        """Take requests, unless it does already."""

    async def until_open(self) -> bool:
        """True once it takes requests, though weights still come, and False once it is known that it will not."""

    @property
    def has_own_weights(self) -> bool:
        """It reads the instance's copy no more: that is for others alone. For good, once it is so."""

    async def until_ready(self) -> None:
        """It can take requests, all weights being there. Raises ``EngineBroken`` where it never can."""

    def stop(self, error: BlitzError | None = None) -> None:
        """End soon; requests still here end with ``error`` (``Unavailable``). Does not wait: ``join`` does."""

    def join(self, timeout_s: float) -> bool:
        """Wait for the end; False if it has not come after ``timeout_s``."""

    def stats(self) -> LoopStats:
        """The latest figures; never waits."""

    def submit(self, sequence: ActiveSequence) -> Future[None]:
        """Accept a request; the future carries a refusal."""

    def cancel(self, request_id: str, attempt: int) -> Future[bool]:
        """Cancel a request; False if it is not here."""

    def cancel_gateway(self, gone: Gone) -> Future[int]:
        """Cancel the requests of gateways that are gone; the number of them."""

    def count_requests(self) -> Future[int]:
        """How many are here, including those handed over a moment ago."""

    def keep_tbt(self, slo_tbt_s: float) -> None:
        """The objective for the time between two tokens is this from now on; 0: there is none."""

    def see_off(self, bytes_per_s: float, send_back: SendBack, goes: ErrorInfo) -> Future[list[Moving]]:
        """Send back what is to go that way, with ``goes``; what is worth moving with its KV, over a network of so much.
        None where KV stays."""

    def hand_back(self, leaves: ErrorInfo) -> Future[None]:
        """All that is here ends with this, to go on elsewhere."""
