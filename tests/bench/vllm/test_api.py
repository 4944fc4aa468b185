from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from pathlib import Path

import psutil
import pytest

from bench.command_line import check_vllm
from bench.lab.errors import LabFailed
from bench.openai_events import Usage
from bench.stream_client import Endpoint, StreamClient
from bench.streamed import Streamed
from bench.vllm import api
from bench.vllm.api import ApiLoad, ApiResult, ApiRound, verdicts
from bench.vllm.server import VllmServer, options_of
from shared.errors import BadRequest
from tests.bench.fake_server import fake_server


def answer(number: int, *tokens_s: float, text: str = "a", sent_s: float = 0.0, error: str = "") -> Streamed:
    return Streamed(number, text, tokens_s, error, sent_s, Usage(64, len(tokens_s)))


def round_of(ttft_s: float, step_s: float, text: str = "a") -> ApiRound:
    """Three requests one after the other, two streams of ten tokens, of which the second begins a second later."""
    singles = tuple(answer(number, ttft_s * (1 + number), text=text) for number in range(3))
    times_s = [step_s * (1 + token) for token in range(10)]
    return ApiRound(singles, (answer(3, *times_s, text=text), answer(4, *times_s, text=text, sent_s=1.0)))


def test_no_prompt_is_asked_twice_and_all_have_one_length() -> None:
    load = ApiLoad(singles=3, streams=2)
    rounds = [load.requests(number) for number in range(-1, 3)]
    prompts = [request.prompt for requests in rounds for request in requests]
    assert len(set(prompts)) == len(prompts) == 20
    assert {len(prompt) for prompt in prompts} == {64}
    assert [request.max_tokens for request in rounds[0]] == [4, 4, 4, 64, 64]
    assert load.requests(1) == rounds[2]


def test_rates_are_from_the_first_request_to_the_last_token() -> None:
    one = round_of(0.010, 0.1)
    assert one.ttft_ms == pytest.approx(20.0)
    assert one.tokens_per_s == pytest.approx(20 / 2.0)


def test_what_compares_the_two_is_taken_round_by_round() -> None:
    theirs = (round_of(0.010, 0.1), round_of(0.020, 0.3), round_of(0.011, 0.1))
    ours = (round_of(0.011, 0.1), round_of(0.021, 0.3), round_of(0.011, 0.2))
    found = ApiResult(theirs, ours).document()
    assert (found["rounds"], found["requests"], found["failed"], found["other_texts"]) == (3, 30, 0, 0)
    assert (found["ttft_ms"], found["ttft_ms_of_vllm"]) == (22.0, 22.0)
    assert found["ttft_more_ms"] == 2.0
    assert found["throughput_ratio"] == 1.0
    assert found["rounds_of"]["tokens_per_s"] == [10.0, 5.0, 6.7]


def test_texts_that_differ_and_requests_that_fail_are_counted() -> None:
    others = ApiResult((round_of(0.1, 0.1),), (round_of(0.1, 0.1, "b"),)).document()
    assert others["other_texts"] == 5
    assert others["other_texts_of"][0] == {"number": 0, "ours": "b", "vllm": "a"}
    broken = ApiRound(
        (answer(0, 0.1), answer(1, error="503: full"), answer(2, 0.1)), (answer(3, 0.1), answer(4, 0.1, text="b"))
    )
    found = ApiResult((round_of(0.1, 0.1),), (broken,)).document()
    assert (found["failed"], found["errors"], found["other_texts"]) == (1, ["503: full"], 1)
    assert "ttft_ms" not in found


@pytest.mark.parametrize(("more_ms", "ratio", "word"), [(3.0, 0.97, "met"), (3.1, 0.969, "missed")])
def test_each_aim_is_met_or_missed(more_ms: float, ratio: float, word: str) -> None:
    said = verdicts({"ttft_more_ms": more_ms, "throughput_ratio": ratio})
    assert [line.rpartition(" ")[2] for line in said] == [word, word]


async def test_both_are_asked_the_same_in_alternation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "REST_S", 0.0)
    order: list[str] = []
    lines: list[str] = []

    def noted(name: str) -> object:
        def script(_number: int) -> str:
            if not order or order[-1] != name:
                order.append(name)
            return "ok"

        return script

    async with fake_server(noted("theirs")) as theirs, fake_server(noted("ours")) as ours:  # type: ignore[arg-type]
        clients = [StreamClient(Endpoint.of(server.url)) for server in (theirs, ours)]
        result = await api.ask_rounds(clients, ApiLoad(2, 3), 2, lines.append)
        for client in clients:
            client.close()
    # One that does not count, then two that do; of two rounds, the same one is asked last and first.
    assert order == ["ours", "theirs", "ours", "theirs"]
    assert [body["prompt"] for body in theirs.bodies] == [body["prompt"] for body in ours.bodies]
    assert (theirs.most_running, ours.most_running) == (3, 3)
    found = result.document()
    assert (found["rounds"], found["requests"], found["failed"], found["other_texts"]) == (2, 20, 0, 0)
    assert len(lines) == 2


def test_arguments_are_options_of_a_command_line() -> None:
    arguments = {"dtype": "float32", "max_num_seqs": 16, "enforce_eager": True, "enable_prefix_caching": False}
    assert options_of(arguments | {"kv_cache_gib": 1}) == [
        *("--dtype", "float32", "--max-num-seqs", "16", "--enforce-eager", "--no-enable-prefix-caching")
    ]


def test_an_interpreter_must_be_one(tmp_path: Path) -> None:
    for given in ("", str(tmp_path / "none")):
        with pytest.raises(BadRequest, match="BLITZ_VLLM_PYTHON"):
            check_vllm(given)
    check_vllm(sys.executable)


LISTENS = """#!{python}
import http.server, json, os, subprocess, sys
from pathlib import Path
child = subprocess.Popen(["sleep", "60"])
told = {{"options": sys.argv[1:], "kv": os.environ["VLLM_CPU_KVCACHE_SPACE"], "child": child.pid}}
told |= {{"bind": os.environ["VLLM_CPU_OMP_THREADS_BIND"], "threads": os.environ["OMP_NUM_THREADS"]}}
Path({file!r}).write_text(json.dumps(told))
class Models(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Models).serve_forever()
"""


async def test_a_server_answers_and_goes_with_all_that_it_has_started(tmp_path: Path) -> None:
    interpreter, file = tmp_path / "python", tmp_path / "told.json"
    interpreter.write_text(LISTENS.format(python=sys.executable, file=str(file)))
    interpreter.chmod(0o700)
    arguments = {"max_model_len": 512, "kv_cache_gib": 2}
    async with asyncio.timeout(60):
        async with VllmServer(
            str(interpreter), tmp_path, "model", arguments, threads=3, log=tmp_path / "log"
        ) as server:
            told = json.loads(file.read_text())
            assert psutil.pid_exists(told["child"])
        with contextlib.suppress(psutil.NoSuchProcess):
            while psutil.Process(told["child"]).status() != psutil.STATUS_ZOMBIE:
                await asyncio.sleep(0.01)
    assert server.url.rpartition(":")[2] in told["options"]
    assert told["options"][-2:] == ["--max-model-len", "512"]
    assert (told["kv"], told["threads"], told["bind"]) == ("2", "3", "nobind")


async def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    """This interpreter has no vLLM."""
    server = VllmServer(sys.executable, tmp_path, "model", {}, threads=1, log=tmp_path / "log")
    with pytest.raises(LabFailed, match=r"ended with 1: .*vllm"):
        async with asyncio.timeout(60), server:
            pass
