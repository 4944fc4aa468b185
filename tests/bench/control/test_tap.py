from __future__ import annotations

from bench.control.tap import Sizes, heard, plain
from shared import subjects


def test_sizes_are_of_payload_and_headers_and_answers_belong_to_their_question() -> None:
    sizes = Sizes()
    stream = (
        b"INFO {}\r\n"
        b"MSG blitz.v1.pool.snapshot 1 _INBOX.gateway.a.1 3\r\nabc\r\n"
        b"MSG _INBOX.gateway.a.1 2 7\r\nMSG x 1\r\n"
        b"HMSG blitz.v1.plans.worker.w-1 3 12 14\r\nNATS/1.0\r\n\r\nab\r\n"
        b"MSG blitz.v1.worker.w-2.cancel 4 1\r\nx\r\n"
        b"PING\r\n"
    )
    # However the stream is cut.
    wants = [sizes.feed(stream[at : at + 5]) for at in range(0, len(stream), 5)]
    assert wants.count(True) == 1
    assert sizes.messages == 4
    assert sizes.largest == {
        "blitz.v1.pool.snapshot": 3,
        "blitz.v1.pool.snapshot (answer)": 7,
        "blitz.v1.plans.worker.*": 14,
        "blitz.v1.worker.*.cancel": 1,
    }


def test_it_never_listens_where_somebody_wants_to_learn_that_nobody_does() -> None:
    assert subjects.nobody() not in heard()
    assert not any(subject.endswith((".holder", ".holder.*")) for subject in heard())
    assert "blitz.v1.pool.snapshot" in heard()


def test_names_of_clients_are_left_out() -> None:
    assert plain("_INBOX.worker.0a.1b.2c") == "_INBOX.worker"
    assert plain("blitz.v1.gateway.heartbeat") == "blitz.v1.gateway.heartbeat"
