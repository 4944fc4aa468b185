"""Prompts computed by one worker, decoded by another."""

from __future__ import annotations

import asyncio

import pytest

from services.worker.core.kv_admission import room
from services.worker.engine.mock.settings import MockTiming
from services.worker.requests import inbox
from shared.errors import NotFound
from tests.services.fake_gateway import expected_tokens
from tests.services.worker.kv_transfer.rig import PROMPT, Disaggregated, disaggregated
from tests.services.worker.kv_transfer.sender.steps import Gate
from tests.services.worker.late_workers import also_late
from tests.wait_until import eventually

SLOW = MockTiming(layer_base_s=0.01)


def _full_soon(worker_id: str) -> dict[str, object]:
    """The decode worker has one seat, and takes its time."""
    return {"max_running_requests": 1, "mock": SLOW} if worker_id == "w1" else {}


async def _computed_to(pair: Disaggregated, layer: int, request_id: str = "r", *, max_tokens: int = 8) -> Gate:
    """The KV of the layers before is there, and the prompt is computed no further until the gate is opened."""
    gate = Gate(pair.prefill, layer)
    await pair.submit(request_id, max_tokens=max_tokens)
    await eventually(
        lambda: any(a.layers_here == layer for a in pair.decode.service.parts.kv_receiver.reservations.values())
    )
    return gate


async def test_a_prompt_computed_here_is_decoded_there(redis_url: str) -> None:
    async with disaggregated(redis_url) as pair:
        await pair.submit("r")
        await pair.ends("r")
        assert pair.decoded_by("r") == ["w0", "w1"]
        (first,) = [p for b in pair.gateway.batches if b.worker_id == "w0" for p in b.parts if p.token_ids]
        assert first.offset == 0
        assert len(first.token_ids) == 1
        await pair.clean()
        await eventually(lambda: pair.outcomes() == {"moved": 1})


@also_late()
async def test_log_probabilities_of_the_prompt_come_from_here_alone_and_before_all_tokens(redis_url: str) -> None:
    async with disaggregated(redis_url) as pair:
        for number in range(4):
            await pair.submit(f"r{number}", prompt=PROMPT[number:], prompt_logprobs=3)
        for number in range(4):
            await pair.ends(f"r{number}")
            assert pair.decoded_by(f"r{number}") == ["w0", "w1"]
            parts = pair.gateway.parts[f"r{number}", 1]
            num_said = sum(part.prompt is not None for part in parts)
            said = [part.prompt for part in parts[:num_said] if part.prompt is not None]
            assert len(said) == num_said, "nothing came between them"
            assert [one.start for one in said] == [1, *(one.end for one in said)][:num_said]
            assert said[-1].end == len(PROMPT) - number
        await pair.clean()
        await eventually(lambda: pair.outcomes() == {"moved": 4})


async def test_what_the_decode_instance_has_not_of_a_prompt_it_does_not_make_up(redis_url: str) -> None:
    async with disaggregated(redis_url) as pair:
        await pair.submit("r", prompt_logprobs=3)
        await pair.ends("r")
        with pytest.raises(NotFound):
            await pair.gateway.resend("w1", "r", offset=8, prompt_offset=5)
        before = len(pair.gateway.parts["r", 1])
        await pair.gateway.resend("w1", "r", offset=8)
        await eventually(lambda: len(pair.gateway.parts["r", 1]) > before)
        assert all(part.prompt is None for part in pair.gateway.parts["r", 1][before:])


@also_late()
async def test_many_at_once(redis_url: str) -> None:
    async with disaggregated(redis_url) as pair:
        prompts = {f"r{i}": tuple(32 + (i * 7 + j) % 90 for j in range(10 + 17 * i)) for i in range(8)}
        for request_id, prompt in prompts.items():
            await pair.submit(request_id, prompt=prompt, max_tokens=20)
        for request_id in prompts:
            await pair.ends(request_id, max_tokens=20)
        await pair.clean()
        await eventually(lambda: pair.outcomes() == {"moved": len(prompts)})


async def test_kv_leaves_while_later_layers_are_computed(redis_url: str) -> None:
    async with disaggregated(redis_url) as pair:
        gate = await _computed_to(pair, 1)
        assert pair.gateway.tokens("r") == ()
        gate.open()
        await pair.ends("r")
        await pair.clean()


async def test_a_request_of_one_token_goes_nowhere(redis_url: str) -> None:
    async with disaggregated(redis_url, mock=SLOW) as pair:
        await pair.submit("r", max_tokens=1)
        await pair.ends("r", max_tokens=1)
        assert pair.decoded_by("r") == ["w0"]
        await pair.clean()
        await eventually(lambda: pair.outcomes() == {"ended": 1})


async def test_without_the_decode_worker_it_is_decoded_here(redis_url: str) -> None:
    async with disaggregated(redis_url) as pair:
        await pair.decode.kill()
        await pair.submit("r")
        await pair.ends("r")
        assert pair.decoded_by("r") == ["w0"]
        await pair.clean()
        await eventually(lambda: pair.outcomes() == {"kept": 1})


async def test_the_decode_worker_dies_while_kv_comes(redis_url: str) -> None:
    async with disaggregated(redis_url) as pair:
        gate = await _computed_to(pair, 2)
        await pair.decode.kill()
        gate.open()
        await pair.ends("r")
        await pair.clean()
        await eventually(lambda: pair.outcomes() == {"kept": 1})


async def test_without_room_there_it_is_decoded_here(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "ROOM_PATIENCE_S", 0.2)
    async with disaggregated(redis_url, each=_full_soon) as pair:
        await pair.gateway.submit("w1", pair.place.instance_id, "other", max_tokens=5000)
        await pair.submit("r")
        await pair.ends("r")
        assert pair.decoded_by("r") == ["w0"]
        await pair.gateway.cancel("w1", "other")
        await pair.clean()


async def test_it_waits_a_moment_for_room(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "ROOM_PATIENCE_S", 60.0)
    async with disaggregated(redis_url, each=_full_soon) as pair:
        await pair.gateway.submit("w1", pair.place.instance_id, "other", max_tokens=5000)
        await pair.submit("r")
        await pair.gateway.tokens_arrived("r", 1)
        await pair.gateway.cancel("w1", "other")
        await pair.ends("r")
        assert pair.decoded_by("r") == ["w0", "w1"]
        await pair.clean()


async def test_a_cancel_frees_both_sides(redis_url: str) -> None:
    async with disaggregated(redis_url) as pair:
        gate = await _computed_to(pair, 2)
        await pair.gateway.cancel("w0", "r")
        (transfer,) = pair.prefill.service.parts.kv_sender.transfers.values()
        await eventually(lambda: transfer.is_over)
        gate.open()
        await pair.clean()
        await eventually(lambda: pair.outcomes() == {"ended": 1})


async def test_a_cancel_follows_the_request(redis_url: str) -> None:
    async with disaggregated(redis_url) as pair:
        await pair.submit("r", max_tokens=5000)
        await eventually(lambda: "w1" in pair.decoded_by("r"))
        await pair.gateway.cancel("w0", "r")
        await pair.clean()


async def test_a_question_follows_the_request(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "OWNER_TIMEOUT_S", 60.0)
    async with disaggregated(redis_url) as pair:
        await pair.submit("r", max_tokens=30)
        await pair.ends("r", max_tokens=30)
        await eventually(lambda: pair.outcomes())
        pair.gateway.parts.clear()
        await pair.gateway.resend("w0", "r")
        await pair.gateway.end_of("r")
        assert pair.gateway.tokens("r") == expected_tokens(30, PROMPT)
        await pair.clean()


async def test_the_prefill_worker_dies(redis_url: str) -> None:
    async with disaggregated(redis_url) as pair:
        gate = await _computed_to(pair, 2, "gone")
        gate.open()
        await pair.prefill.kill()
        # Nobody renews its room. Another attempt is computed and decoded where it was to be decoded.
        await pair.gateway.submit("w1", pair.place.instance_id, "gone", attempt=2, prompt=PROMPT)
        await pair.gateway.end_of("gone", attempt=2)
        assert pair.gateway.tokens("gone", attempt=2) == expected_tokens(8, PROMPT)
        await pair.clean()


async def test_a_drained_decode_instance_finishes_what_it_has_and_takes_no_more(redis_url: str) -> None:
    async with disaggregated(redis_url, mock=SLOW) as pair:
        await pair.submit("there", max_tokens=20)
        await eventually(lambda: "w1" in pair.decoded_by("there"))
        pair.decode.serving.drain()
        await pair.submit("here")
        await pair.ends("there", max_tokens=20)
        await pair.ends("here")
        assert pair.decoded_by("here") == ["w0"]
        await pair.clean()


async def test_a_stopped_prefill_worker_finishes_its_requests(redis_url: str) -> None:
    async with disaggregated(redis_url, mock=SLOW) as pair:
        await pair.submit("r", max_tokens=20)
        await pair.gateway.tokens_arrived("r", 1)
        stopping = asyncio.create_task(pair.prefill.stop())
        await pair.ends("r", max_tokens=20)
        await stopping
        await pair.clean()


async def test_the_bus_goes_away_for_a_moment(redis_url: str) -> None:
    async with disaggregated(redis_url) as pair:
        gate = await _computed_to(pair, 2, max_tokens=20)
        pair.prefill.bus.go_down()
        gate.open()
        await asyncio.sleep(0.3)
        pair.prefill.bus.go_up()
        await pair.gateway.end_of("r")
        await pair.clean()
