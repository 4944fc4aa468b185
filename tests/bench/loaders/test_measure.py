"""Small checkpoints, but real processes: each reads what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from bench import page_cache
from bench.cli import app
from bench.lab.checkpoint import make_checkpoint
from bench.loaders import measure as measuring
from bench.loaders.child import Answer
from bench.loaders.measure import ReadingFailed, measure
from bench.loaders.methods import METHODS, Method
from bench.loaders.readers import Disk, Safetensors
from shared.checkpoint import inspect_checkpoint

BY_NAME = {method.name: method for method in METHODS}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("loaders"), 16, num_files=2)


@pytest.mark.ucx
@pytest.mark.timeout(300)  # five processes that import torch, one after the other
def test_ours_and_theirs_read_the_same_weights(checkpoint: Path) -> None:
    methods = [BY_NAME[name] for name in ("safetensors", "disk", "network")]
    warm = [Method(m.name, tuple(s for s in m.states if s != "cold"), m.what) for m in methods]
    result = measure(checkpoint, repetitions=1, methods=warm)
    assert result.rows() == (("safetensors", "warm"), ("disk", "warm"), ("network", "unused"))
    assert all(reading.seconds > 0 and reading.num_bytes > 16 << 20 for reading in result.readings)


def test_weights_that_differ_are_noticed(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(_: object, method: Method, state: str) -> tuple[Answer, str]:
        return Answer(seconds=1.0, num_bytes=1, digest=method.name), ""

    monkeypatch.setattr(measuring, "read_once", read)
    with pytest.raises(ReadingFailed, match="disk"):
        measure(checkpoint, repetitions=1, methods=[BY_NAME["safetensors"], BY_NAME["disk"]])


def test_a_digest_depends_on_every_byte(checkpoint: Path) -> None:
    inspected = inspect_checkpoint(checkpoint, with_hash=False)
    ours, theirs = Disk(inspected), Safetensors(inspected)
    ours.read()
    theirs.read()
    assert ours.digest() == theirs.digest()
    changed = next(iter(theirs.tensors().values())).view(torch.uint8).view(-1)
    changed[-1] ^= 1
    assert ours.digest() != theirs.digest()


def test_a_reader_that_is_not_installed_is_left_out_with_the_reason(checkpoint: Path) -> None:
    result = measure(checkpoint, repetitions=1, methods=[Method("runai_streamer", ("warm",), "", "no-such-package")])
    assert result.readings == ()
    assert "no-such-package" in result.skipped["runai_streamer"]


def test_where_the_page_cache_stays_only_cold_readings_are_left_out(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drop(*_: object, **__: object) -> str:
        raise page_cache.CacheStays("all of it stays")

    monkeypatch.setattr(page_cache, "drop", drop)
    result = measure(checkpoint, repetitions=1, methods=[BY_NAME["disk"]])
    assert result.rows() == (("disk", "warm"),)
    assert result.skipped == {"disk, cold": "all of it stays"}


def test_a_child_that_fails_is_told_with_its_last_words(checkpoint: Path) -> None:
    with pytest.raises(ReadingFailed, match="KeyError"):
        measure(checkpoint, repetitions=1, methods=[Method("guesswork", ("unused",), "")])


def test_a_checkpoint_too_small_for_a_layer_is_refused() -> None:
    result = CliRunner().invoke(app, ["loaders", "--mib", "3"])
    assert result.exit_code == 2
    assert "not 3" in result.output


def test_the_result_is_written_and_the_checkpoint_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(_: object, method: Method, state: str) -> tuple[Answer, str]:
        return Answer(seconds=0.5, num_bytes=10**9, digest="same"), "drop_caches" if state == "cold" else ""

    monkeypatch.setattr(measuring, "read_once", read)
    folder, file = tmp_path / "disk", tmp_path / "loaders.json"
    folder.mkdir()
    arguments = ["loaders", "--mib", "8", "--files", "2", "--repetitions", "2", "--folder", str(folder)]
    result = CliRunner().invoke(app, [*arguments, "--json", str(file)])
    assert result.exit_code == 0, result.output
    document = json.loads(file.read_text())
    assert document["methods"]["disk"]["cold"]["gbytes_per_s"] == 2.0
    assert (document["num_files"], document["page_cache_dropped_by"]) == (2, "drop_caches")
    assert list(folder.iterdir()) == []
