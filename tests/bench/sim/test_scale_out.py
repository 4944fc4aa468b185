"""One scale-out, looked at closely: what is asked for and cannot be, what is seen, and what a command makes of it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from bench.sim.cli import app
from bench.sim.cluster import Cluster, known_cluster
from bench.sim.models import known_model
from bench.sim.scale_out import BIN_S, LEAD_S, Row, ScaleOut, in_bins, run, tokens_per_s
from bench.sim.scale_out_report import in_words, panels
from bench.sim.scale_out_report import simulated as all_of
from bench.sim.setup import Setup
from bench.systems import SYSTEMS, Split
from shared.errors import BadRequest

ASKED = ScaleOut(2, Split(2, 2), packed=True, window_s=1.5)
NIC_GBPS, HOST_LINK_GBPS = 400.0, 512.0


def cluster() -> Cluster:
    """Hosts of four GPUs without NVLink; links are four times as fast as Cluster B's, so that a load takes a second."""
    b = known_cluster("b")
    of_four = {"gpus_per_host": 4, "nics_per_host": 4, "ssds_per_host": 4, "gpus_per_domain": 1}
    return msgspec.structs.replace(b, **of_four, scale_up_gbps=None, nic_gbps=NIC_GBPS, host_link_gbps=HOST_LINK_GBPS)


def setup() -> Setup:
    return Setup(cluster=cluster(), model=known_model("mistral-24b", "a100"))


@cache
def row(name: str) -> Row:
    return run(setup(), SYSTEMS[name], ASKED)[0]


def load_s(gbps: float) -> float:
    """Of a copy over a link; before it come a plan and connections, and after it the engine starts."""
    return setup().model.record.weights_bytes * 8e-9 / gbps


# --- what cannot be ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--scale-out", "0"), "a number of instances, 1 or more, not 0"),
        (("--scale-out", "-3"), "1 or more, not -3"),
        (("--scale-out", "30"), "cluster 'a' holds 32 instances of 1 GPU, 3 are there before, and 29 are left"),
        (("--scale-out", "2", "--from", "16,15"), "31 are there before, and 1 is left"),
        (("--scale-out", "1", "--from", "30,9"), "39 are there before, and 0 are left"),
        (("--scale-out", "2", "--from", "0,2"), "one prefill and one decode instance at least, not 0,2"),
        (("--scale-out", "2", "--from", "2"), "--from is prefill and decode instances, as 1,2, not '2'"),
        (("--scale-out", "2", "--from", "a,b"), "not 'a,b'"),
        (("--scale-out", "2", "--from", f"1,{'9' * 5000}"), "--from is prefill and decode instances"),
        (("--scale-out", "2", "--window", "0"), "at most 600 seconds, and more than 0, not 0.0"),
        (("--scale-out", "2", "--window", "nan"), "not nan"),
        (("--scale-out", "2", "--systems", "blitz,static-full"), "static-full does not scale"),
        (("--scale-out", "2", "--systems", "blitz-colocated"), "blitz-colocated has no prefill instances"),
        (("--scale-out", "2", "trace.csv"), "makes its own prompts, and goes without TRACE"),
        (("--scale-out", "2", "--synthetic", "azure-code", "--what-if", "hosts"), "without --synthetic, --what-if"),
        (("--scale-out", "2", "--kill-every", "1"), "without --kill-every"),
        (("--from", "1,2"), "--from and --packed are of --scale-out"),
        (("--packed",), "--from and --packed are of --scale-out"),
    ],
)
def test_what_cannot_be_is_a_line(arguments: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    (line,) = result.output.strip().splitlines()
    assert said in line


def test_all_that_is_free_may_be_asked_for() -> None:
    ScaleOut(4, Split(2, 2)).check(setup(), [SYSTEMS["blitz"]])
    with pytest.raises(BadRequest, match="4 are left"):
        ScaleOut(5, Split(2, 2)).check(setup(), [SYSTEMS["blitz"]])


# --- what is seen ------------------------------------------------------------------------------


def test_what_was_computed_is_spread_over_the_time_that_it_took() -> None:
    halves = in_bins([(-0.05, 0.05, 10.0)], 0.2)
    assert halves == pytest.approx([0, 0, 0, 0, 50, 50, 0])
    assert sum(in_bins([(-LEAD_S, 0.2, 7.0), (0.1, 0.1, 1.0)], 0.2)) * BIN_S == pytest.approx(8.0)
    # Outside of the bins it does not count.
    assert sum(in_bins([(0.1, 0.3, 10.0), (0.5, 0.5, 1.0)], 0.2)) * BIN_S == pytest.approx(5.0)


def test_each_system_loads_over_its_own_links() -> None:
    weights = setup().model.record.weights_bytes
    nic, host = row("blitz-nolive"), row("allcache")
    assert (nic.loaded, host.loaded) == (2, 2)
    assert nic.weights_bytes == {"nic": weights, "host_link": weights}  # the second GPU is fed by its neighbour
    assert host.weights_bytes == {"host_link": 2 * weights}
    assert host.last_serving_s == pytest.approx(load_s(HOST_LINK_GBPS) + 0.033, abs=0.002)
    assert nic.last_serving_s == pytest.approx(load_s(NIC_GBPS) + 0.033, abs=0.02)
    assert row("sllm").last_serving_s is None  # no instance has left a copy on the other host


def test_times_come_in_their_order() -> None:
    for name in ("blitz", "blitz-nolive", "allcache"):
        one = row(name)
        assert one.first_layer_s is not None
        assert one.first_token_s is not None
        assert one.first_serving_s is not None
        assert one.last_serving_s is not None
        assert 0 < one.first_layer_s < one.first_serving_s <= one.last_serving_s
        assert one.first_token_s > one.first_layer_s
        assert one.serving_s == (one.first_serving_s, one.last_serving_s)


def test_only_a_live_pair_gives_tokens_before_an_instance_serves() -> None:
    live, stopped = row("blitz"), row("blitz-nolive")
    assert (live.live_pairs, stopped.live_pairs) == (1, 0)
    assert (live.first_token_s or 9) < (live.first_serving_s or 0)
    assert (stopped.first_token_s or 0) > (stopped.first_serving_s or 9)
    assert live.first_tokens > stopped.first_tokens
    # What the target has computed ahead counts as soon as it is.
    before = [one.tokens_per_s[round((LEAD_S + 0.6) / BIN_S)] for one in (stopped, live)]
    assert before == pytest.approx([2 * tokens_per_s(setup()), 3 * tokens_per_s(setup())], rel=0.1)


def test_throughput_is_what_instances_can_compute() -> None:
    stopped, each = row("blitz-nolive"), tokens_per_s(setup())
    assert max(stopped.tokens_per_s) < 4 * each * 1.05
    assert stopped.full_s is not None
    assert stopped.full_s >= (stopped.last_serving_s or 9)
    assert sum(stopped.first_tokens_per_s) * BIN_S == pytest.approx(stopped.first_tokens)


def test_chains_are_told_in_words() -> None:
    assert in_words(row("blitz-nolive")) == "host-0-gpu-0 > 1 > 1"
    assert in_words(row("allcache")) == "2 x memory of host-1-gpu-0 > 1"
    assert in_words(row("sllm")) == "2 x disk > 1"


def test_the_same_command_gives_the_same_bytes_and_one_curve_for_each_system() -> None:
    systems = [SYSTEMS["blitz"], SYSTEMS["allcache"]]
    found, documents = all_of(setup(), systems, ASKED, draws=True)
    assert found.systems == {"blitz": row("blitz"), "allcache": row("allcache")}
    assert [document.label for document in documents] == ["blitz", "allcache"]
    for panel in panels(found):
        assert [curve.label for curve in panel.curves] == ["blitz", "allcache"]
        assert all(len(curve.x) == len(curve.y) for curve in panel.curves)


def test_a_table_in_80_columns_and_all_figures_in_a_file(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ["--scale-out", "1", "--window", "0.5", "--cluster", "b", "--model", "mistral-24b"]
    result = CliRunner().invoke(app, [*arguments, "--json", str(out)])
    assert result.exit_code == 0, result.output
    table = [line for line in result.stdout.splitlines() if ": " not in line]
    assert max(map(len, table)) <= 80
    written = json.loads(out.read_bytes())
    assert (written["scale_out"], written["prefill_before"], written["decode_before"]) == (1, 1, 2)
    assert list(written["systems"]) == ["blitz", "blitz-nolive", "blitz-star", "overlap", "sllm", "allcache"]
    assert len(written["systems"]["blitz"]["tokens_per_s"]) == 10
