from __future__ import annotations

import threading
import time
from itertools import islice

import pytest

from bench.lab import goodput, stream
from bench.lab.errors import LabFailed
from bench.lab.stream import Sample, Samples, Stream
from compose.ports import free_port

GBIT = 10**9 // 8
STEADY_THEN_HALVED = Samples(
    (
        Sample(10.0, 0),
        Sample(11.0, GBIT),
        Sample(12.0, 2 * GBIT),
        Sample(13.0, 2 * GBIT + GBIT // 2),
        Sample(14.0, 3 * GBIT),
    )
)


def test_goodput_is_taken_between_samples_too() -> None:
    assert STEADY_THEN_HALVED.gbps(10.0, 12.0) == pytest.approx(1.0)
    assert STEADY_THEN_HALVED.gbps(11.5, 12.5) == pytest.approx(0.75)
    assert STEADY_THEN_HALVED.gbps(12.0, 13.5) == pytest.approx(0.5)


def test_the_lowest_goodput_is_that_of_the_worst_sample_within_the_span() -> None:
    assert STEADY_THEN_HALVED.lowest_gbps(10.5, 13.0) == pytest.approx(0.5)
    assert STEADY_THEN_HALVED.lowest_gbps(10.0, 12.0) == pytest.approx(1.0)
    assert STEADY_THEN_HALVED.lowest_gbps(10.2, 10.4) == pytest.approx(1.0)


@pytest.mark.parametrize(("begin_s", "end_s"), [(9.0, 12.0), (12.0, 15.0), (12.0, 12.0)])
def test_a_time_without_the_stream_has_no_goodput(begin_s: float, end_s: float) -> None:
    with pytest.raises(LabFailed):
        STEADY_THEN_HALVED.gbps(begin_s, end_s)


def test_a_receivers_lines_become_samples_and_the_first_byte_is_noticed() -> None:
    followed = Stream()
    followed.follow(["10.0 0\n", "10.1 500\n"])
    followed.wait_begun()
    assert followed.samples() == Samples((Sample(10.0, 0), Sample(10.1, 500)))


def test_a_stream_that_starves_is_still_sampled() -> None:
    port = free_port()
    received = stream.receive("127.0.0.1", port)
    connected: list[object] = []
    sending = threading.Thread(target=lambda: connected.append(goodput.connect("127.0.0.1", port)))
    sending.start()
    begin_s = time.time()
    first, second = next(received), next(received)
    sending.join()
    received.close()
    assert (first.num_bytes, second.num_bytes) == (0, 0)
    assert begin_s <= first.at_s < second.at_s


def test_a_stream_delivers_until_its_receiver_is_gone() -> None:
    port = free_port()
    received = stream.receive("127.0.0.1", port)
    sending = threading.Thread(target=stream.send, args=("127.0.0.1", port))
    sending.start()
    seen = [next(received).num_bytes]
    # In one sample's time a busy machine may not let the sender run.
    for sample in islice(received, 1000):
        if sample.num_bytes > seen[-1]:
            seen.append(sample.num_bytes)
        if len(seen) == 3:
            break
    received.close()
    sending.join(60)
    assert not sending.is_alive()
    assert len(seen) == 3
