"""The decode side of a pair of prefill instances: two workers send the KV of one request, each what it ran."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from services.worker.core.kv_admission import staging
from services.worker.kv_transfer.connector import KvConnector
from services.worker.kv_transfer.incoming import IncomingKv
from services.worker.weights.peers import PeerChannels
from shared.errors import Conflict
from shared.messages.disaggregated import DecodeReserved
from shared.messages.generation import Submit
from tests.services.worker.kv_transfer.decode_side import decoded, reservations_of, used_blocks
from tests.services.worker.kv_transfer.fakes import FakePrefill, clean
from tests.services.worker.lone_worker import LoneWorker


@pytest.fixture
async def source(alone: LoneWorker, prefill: FakePrefill) -> AsyncIterator[FakePrefill]:
    """The other member of a pair, which goes on where ``prefill``, the target, stops."""
    source = FakePrefill(alone, alone.worker.serving.instance_id, name="source")
    yield source
    await source.close()


async def joined(source: FakePrefill, request: Submit, layer: int) -> DecodeReserved:
    return await source.reserve(request, first_layer=layer)


async def test_each_of_two_sends_the_layers_that_it_ran(
    alone: LoneWorker, prefill: FakePrefill, source: FakePrefill
) -> None:
    request = prefill.request()
    layers = prefill.kv(request)
    first = await prefill.reserve(request)
    await prefill.send(first, {0: layers[0]})
    assert await prefill.renew(request, first, wait_layers=1) == 1
    second = await joined(source, request, 2)
    assert second == await joined(source, request, 2), "asked again"
    assert second.ticket != first.ticket
    # The rest of the second one's comes first, and waits for the layers before.
    await source.send(second, dict(enumerate(layers[2:])))
    assert await source.renew(request, second, wait_layers=1) == 0
    with pytest.raises(Conflict, match="only 1 layers"):
        await source.begin(request)
    await prefill.send(first, {1: layers[1]})
    while await source.renew(request, second, wait_layers=len(layers) - 2) < len(layers) - 2:
        pass
    await prefill.release(request)  # it has nothing to say any more
    await source.begin(request)
    await prefill.release(request)
    await decoded(alone, request)


async def test_who_goes_on_gives_up_for_both(alone: LoneWorker, prefill: FakePrefill, source: FakePrefill) -> None:
    request = prefill.request()
    await prefill.reserve(request)
    await joined(source, request, 1)
    await source.release(request)
    assert not reservations_of(alone)
    assert await used_blocks(alone) == 0


async def test_a_sender_that_is_lost_costs_both_the_reservation(
    alone: LoneWorker, prefill: FakePrefill, source: FakePrefill
) -> None:
    request = prefill.request()
    await prefill.reserve(request)
    second = await joined(source, request, 2)
    alone.fabric.kill(prefill.transport.address)
    await clean(alone)
    with pytest.raises(Conflict, match="there is no reservation"):
        await source.renew(request, second)


@pytest.mark.parametrize("layer", [-1, 1, 99])
async def test_nobody_goes_on_where_nobody_has_begun_or_behind_what_is_here(
    alone: LoneWorker, prefill: FakePrefill, source: FakePrefill, layer: int
) -> None:
    request = prefill.request()
    with pytest.raises(Conflict):
        await source.reserve(request, first_layer=layer)
    first = await prefill.reserve(request)
    layers = prefill.kv(request)
    await prefill.send(first, {0: layers[0], 1: layers[1]})
    assert await prefill.renew(request, first, wait_layers=2) == 2
    with pytest.raises(Conflict):
        await source.reserve(request, first_layer=layer)
    await joined(source, request, 2)
    with pytest.raises(Conflict):
        await source.reserve(request, first_layer=3)
    await source.release(request)


async def test_another_instance_that_computes_it_from_the_beginning_gets_a_reservation_of_its_own(
    alone: LoneWorker, prefill: FakePrefill, source: FakePrefill
) -> None:
    request = prefill.request()
    first = await prefill.reserve(request)
    await prefill.send(first, {0: prefill.kv(request)[0]})
    await source.arrive(request)
    await prefill.release(request)
    await source.begin(request)
    await decoded(alone, request)


async def test_layers_that_come_while_somebody_joins_are_not_taken_back(
    alone: LoneWorker, prefill: FakePrefill, source: FakePrefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was taken for the second one's KV is given back."""
    request = prefill.request()
    layers = prefill.kv(request)
    first = await prefill.reserve(request)
    connect = IncomingKv.connect

    async def late(kv: IncomingKv, connector: KvConnector, peers: PeerChannels) -> None:
        await connect(kv, connector, peers)
        await prefill.send(first, dict(enumerate(layers[:3])))
        while await prefill.renew(request, first, wait_layers=3) < 3:
            pass

    with monkeypatch.context() as patch:
        patch.setattr(IncomingKv, "connect", late)
        with pytest.raises(Conflict, match="nobody can go on from layer 2"):
            await source.reserve(request, first_layer=2)
    await prefill.send(first, {3: layers[3]})
    while await prefill.renew(request, first, wait_layers=4) < 4:
        pass
    await prefill.begin(request)
    await decoded(alone, request)
    monkeypatch.setattr(staging, "STAGING_BYTES", 1)  # too little, but for somebody who is alone
    await prefill.reserve(request := prefill.request("next"))
    await prefill.release(request)
