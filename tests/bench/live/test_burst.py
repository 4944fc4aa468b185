from __future__ import annotations

import asyncio

import pytest

from bench import stream_client
from bench.lab.errors import LabFailed
from bench.live.burst import Answer, BurstClient
from tests.bench.fake_server import fake_server

PROMPTS = tuple((index, index + 1) for index in range(3))


async def test_a_burst_is_sent_at_once_and_answered_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_client, "IDLE_S", 600.0)
    async with fake_server(gap_s=0.02) as server:
        client = BurstClient(server.url, "fake", output_tokens=3)
        await client.connect(3)
        answers = await asyncio.gather(*client.burst(PROMPTS))
        client.close()
    assert server.most_running == 3
    assert server.connections == 3
    assert [tuple(body["prompt"]) for body in server.bodies] == list(PROMPTS)
    assert all(body["min_tokens"] == body["max_tokens"] == 3 and body["temperature"] == 0 for body in server.bodies)
    assert [answer.text for answer in answers] == ["t0 t1 t2 "] * 3
    assert all(answer.num_tokens == 3 and answer.ttft_s > 0 for answer in answers)


async def test_prompts_alone_are_asked_one_after_another() -> None:
    async with fake_server() as server:
        client = BurstClient(server.url, "fake", output_tokens=2)
        answers = await client.alone(PROMPTS)
        client.close()
    assert (server.most_running, len(answers)) == (1, 3)


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ("429", "queue full"),
        ("error_event", "instance lost"),
        ("cut", "closed"),
        ("garbage", "not json"),
        ("short", "2 tok"),
    ],
)
async def test_an_answer_that_is_none_fails_the_run(behaviour: str, said: str) -> None:
    async with fake_server(lambda n: behaviour) as server:
        client = BurstClient(server.url, "fake", output_tokens=3)
        with pytest.raises(LabFailed, match=said):
            await client.ask(PROMPTS[0])
        client.close()


async def test_a_gateway_that_is_gone_is_named_before_the_burst() -> None:
    client = BurstClient("http://127.0.0.1:9", "fake", output_tokens=3)
    with pytest.raises(LabFailed, match="cannot be reached"):
        await client.connect(1)


def test_outputs_are_the_same_by_text_and_count() -> None:
    assert Answer(1.0, "ab", 2).same_output(Answer(9.0, "ab", 2))
    assert not Answer(1.0, "ab", 2).same_output(Answer(1.0, "ac", 2))
    assert not Answer(1.0, "ab", 2).same_output(Answer(1.0, "ab", 3))
