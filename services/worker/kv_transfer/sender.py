"""The prefill side of disaggregated serving: requests leave with their KV for the instance that decodes them.

A request's decode instance is asked for room as soon as its prompt begins. With the prompt's last part its KV follows,
layer by layer, while later layers are computed. With the first token, which this instance streams itself, the decode
instance takes the request over. If it does not - it is gone, or has no room - the request is decoded here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Ordered

import numpy as np
from opentelemetry import trace
from prometheus_client import CollectorRegistry, Counter

from services.worker.engine.loop import EngineLoop
from services.worker.instance.instance import Instance
from services.worker.kv_transfer.decode_client import Line, Unknown
from services.worker.kv_transfer.tags import kv_tag
from services.worker.kv_transfer.transfer import NotTaken, Over, Shipment
from services.worker.requests.inbox import Serving
from services.worker.scheduling.gateways import Gone
from services.worker.scheduling.schedule import SampledToken
from services.worker.scheduling.sequence import Sequence
from services.worker.weights.peers import TENSOR_LANE, Peers
from shared.bus.base import Bus
from shared.errors import BlitzError, Unavailable
from shared.messages.common import ErrorInfo
from shared.messages.disaggregated import DecodeReserved
from shared.messages.registry import WorkerInfo
from shared.transport.base import Channel, Transfer

log = logging.getLogger(__name__)

EXPORTED_LAYERS = 4
"""Most that are copied out of the KV pool at once."""
LEAVE_S = 2.0


class Departures:
    """Event loop only, but for ``ran_layers`` and ``computed``, which the engine calls on its thread."""

    def __init__(
        self,
        bus: Bus,
        me: WorkerInfo,
        peers: Peers,
        serving: Serving,
        instance: Callable[[], Instance | None],
        *,
        silence_s: float,
        metrics: CollectorRegistry,
    ) -> None:
        """``silence_s``: a decode instance that answers nothing, or takes no bytes, for so long is gone."""
        self._bus = bus
        self._me = me
        self._peers = peers
        self._serving = serving
        self._instance = instance
        self._silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self._shipments: dict[tuple[str, int], Shipment] = {}
        self._tasks: dict[asyncio.Task[None], Shipment] = {}
        self._ended = Counter(
            "blitz_worker_departures_total",
            "Requests that were to be decoded elsewhere, by what became of them",
            ["outcome"],
            registry=metrics,
        )

    # --- from the engine's thread ------------------------------------------------------------

    def ran_layers(self, sequence: Sequence, num_layers: int) -> None:
        """See ``services.worker.engine.loop.Departures``."""
        prefix = sequence.num_tokens, sequence.block_table
        self._loop.call_soon_threadsafe(self._on_layers, sequence, *prefix, num_layers)

    def computed(self, sequence: Sequence, token: SampledToken) -> None:
        """See ``services.worker.engine.loop.Departures``."""
        prefix = sequence.num_tokens - 1, sequence.block_table
        self._loop.call_soon_threadsafe(self._on_computed, sequence, *prefix, token)

    def _on_layers(self, sequence: Sequence, num_tokens: int, block_table: Ordered[int], num_layers: int) -> None:
        shipment = self._shipment(sequence, num_tokens)
        if shipment is not None:
            shipment.ran_layers(block_table, num_layers)

    def _on_computed(self, sequence: Sequence, num_tokens: int, block_table: Ordered[int], token: SampledToken) -> None:
        shipment, instance = self._shipment(sequence, num_tokens), self._instance()
        if shipment is not None:
            shipment.computed(block_table, shipment.instance.engine.loop.engine.num_layers, token)
        elif instance is not None:
            # It ended before the event loop had heard of it, held as it may be.
            instance.engine.call(lambda loop: loop.scheduler.reservations.decode_here(sequence))

    def _shipment(self, sequence: Sequence, num_tokens: int) -> Shipment | None:
        """None if there is nothing to ship any more."""
        known = self._shipments.get(sequence.key)
        if known is not None and known.sequence is sequence:
            return known
        instance, place = self._instance(), sequence.decode_at
        if sequence.finished or instance is None or place is None:
            return None
        shipment = self._shipments[sequence.key] = Shipment(sequence, num_tokens, place, instance)
        task = asyncio.create_task(self._run(shipment))
        self._tasks[task] = shipment
        task.add_done_callback(self._reap)
        return shipment

    def _reap(self, task: asyncio.Task[None]) -> None:
        shipment = self._tasks.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("request %s, which was to leave, is lost here", shipment.sequence.request_id, exc_info=error)

    # --- from the gateways -------------------------------------------------------------------

    def arrived(self) -> None:
        """A request was accepted; it is not begun."""

    def cancel(self, request_id: str, attempt: int) -> None:
        """Nobody waits for a request any more."""
        shipment = self._shipments.get((request_id, attempt))
        if shipment is not None:
            shipment.unwanted()

    def cancel_gateway(self, gone: Gone) -> None:
        """Nor for any of those gateways'."""
        for shipment in self._shipments.values():
            if gone.had(shipment.sequence.gateway_id, shipment.sequence.gateway_incarnation):
                shipment.unwanted()

    # --- one request -------------------------------------------------------------------------

    async def _run(self, shipment: Shipment) -> None:
        sequence, worker_id = shipment.sequence, shipment.place.worker_id
        line = Line(self._bus, self._me, shipment, silence_s=self._silence_s)
        with trace.use_span(self._serving.spans.of(sequence.key), end_on_exit=False):
            try:
                outcome = await self._hand_over(shipment, line)
            except NotTaken as why:
                log.info("request %s is decoded here, not at %s: %s", sequence.request_id, worker_id, why)
                _, outcome = await asyncio.gather(line.release(), self._keep(shipment))
            except Over:
                outcome = "ended"
                await self._free(shipment)
                await line.release()
            except Unknown as why:
                log.warning("request %s: attempt %d ends, for %s may decode it: %s", *sequence.key, worker_id, why)
                outcome = "unknown"
                await self._end(shipment, Unavailable(f"the decode instance does not answer: {why}"))
                await line.release()
            except Exception:  # whatever it is, the request must not stay held
                log.exception("request %s on its way to %s", sequence.request_id, worker_id)
                _, outcome = await asyncio.gather(line.release(), self._keep(shipment))
            finally:
                if self._shipments.get(sequence.key) is shipment:
                    del self._shipments[sequence.key]
        self._ended.labels(outcome).inc()

    async def _hand_over(self, shipment: Shipment, line: Line) -> str:
        """Raises ``Over``, ``NotTaken``, ``Unknown``."""
        sequence = shipment.sequence
        reserved = await line.reserve()
        async with line.kept(reserved):
            await self._send(shipment, line, reserved)
            token = await shipment.until_computed()
        await line.begin(token)
        shipment.check()  # a cancel from now on is passed on
        self._serving.moved([sequence], shipment.place.worker_id)
        shipment.instance.engine.call(lambda loop: loop.scheduler.reservations.release_to_decoder(sequence))
        return "moved"

    async def _send(self, shipment: Shipment, line: Line, reserved: DecodeReserved) -> None:
        """Send every layer's KV once it is computed, never more than the other side has receives for; wait until it has
        all of it. Raises ``NotTaken``, ``Over``."""
        connecting = self._peers.channel(reserved.transport_address, reserved.host, lane=TENSOR_LANE)
        posted: deque[Transfer] = deque()
        num_layers, window = shipment.instance.engine.loop.engine.num_layers, max(1, reserved.window_layers)
        first = here = 0
        try:
            channel = await shipment.unless_over(connecting)
            while first < num_layers:
                await shipment.until(lambda first=first: shipment.layers_done > first)  # type: ignore[misc]
                if first - here >= window:
                    here = await line.until_here(reserved.ticket, first - window + 1)
                last = min(shipment.layers_done, here + window, first + EXPORTED_LAYERS)
                posted.extend(await self._post(shipment, channel, reserved.ticket, first, last))
                first = last
                while posted and posted[0].done:
                    await posted.popleft().wait()
            await line.until_here(reserved.ticket, num_layers)
        except BlitzError as error:
            raise NotTaken(str(error)) from error
        finally:
            for transfer in posted:
                transfer.abort()

    async def _post(self, shipment: Shipment, channel: Channel, ticket: int, first: int, last: int) -> list[Transfer]:
        engine = shipment.instance.engine.loop.engine
        tables, lengths = [shipment.block_table], [shipment.num_tokens]
        try:
            exported = await asyncio.to_thread(engine.export_kv, tables, lengths, last, first_layer=first)
        except Exception as error:  # an engine may raise anything; the blocks of an ended request are another's
            shipment.check()
            log.exception("KV of request %s", shipment.sequence.request_id)
            raise NotTaken(f"its KV cannot be read: {type(error).__name__}: {error}") from error
        layers = np.split(np.frombuffer(exported, dtype=np.uint8), last - first)
        return [channel.send(kv, kv_tag(ticket, first + i)) for i, kv in enumerate(layers)]

    async def _keep(self, shipment: Shipment) -> str:
        """Decode it here, once its prompt is computed."""
        sequence = shipment.sequence
        try:
            await shipment.until_computed()
        except Over:
            await self._free(shipment)
            return "ended"
        shipment.instance.engine.call(lambda loop: loop.scheduler.reservations.decode_here(sequence))
        return "kept"

    async def _free(self, shipment: Shipment) -> None:
        """By what the engine was told before, the request has ended: if it is held, its blocks are free now."""
        sequence = shipment.sequence

        def free(loop: EngineLoop) -> None:
            if sequence.finished:
                loop.scheduler.reservations.release([sequence])

        with contextlib.suppress(BlitzError):  # the engine has stopped, and freed everything
            await asyncio.wrap_future(shipment.instance.engine.call(free))

    async def _end(self, shipment: Shipment, error: BlitzError) -> None:
        """The attempt ends here, and the gateway makes another one."""
        sequence, info = shipment.sequence, ErrorInfo.of(error)

        def end(loop: EngineLoop) -> None:
            loop.scheduler.abort([sequence], info)
            loop.scheduler.reservations.release([sequence])

        with contextlib.suppress(BlitzError):  # the engine has stopped, and ended everything
            await asyncio.wrap_future(shipment.instance.engine.call(end))

    # --- the end -----------------------------------------------------------------------------

    async def instance_gone(self, instance: Instance, _reason: str) -> None:
        """The instance's engine is about to stop: its requests end there."""
        tasks = {task for task, shipment in self._tasks.items() if shipment.instance is instance}
        for task in tasks:
            self._tasks[task].unwanted()
        if tasks:
            await asyncio.wait(tasks, timeout=LEAVE_S)

    async def close(self) -> None:
        """Drop what is under way."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
