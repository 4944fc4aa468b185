"""The engines that there are, and who knows them by name."""

from __future__ import annotations

import subprocess
import sys
from typing import get_args

import msgspec
import pytest

from compose.cli.options import EngineName
from services.planner.core.multicast.topology import HOST_LINK_GBPS, SCALE_UP_GBPS, topology_of
from services.worker.engine.kinds import DEFAULT_ENGINE, ENGINES, check_device, engine_kind
from shared.engines import NO_ENGINE
from shared.errors import BadRequest, Conflict
from shared.messages.registry import WorkerInfo
from tests.checkpoints import tiny_checkpoint
from tests.records import profile, worker


def test_the_command_line_has_them_all() -> None:
    assert set(get_args(EngineName)) == set(ENGINES) - {NO_ENGINE}
    assert DEFAULT_ENGINE in ENGINES


def test_an_unknown_one_and_a_device_that_it_lacks_are_refused() -> None:
    with pytest.raises(BadRequest, match="no engine 'vllm', but torch, mock, none"):
        engine_kind("vllm")
    with pytest.raises(BadRequest, match="--device tpu: in this version the torch engine runs on cpu and cuda only"):
        check_device("torch", "tpu", "--device tpu")
    check_device("mock", "cuda", "--device cuda")


def test_knowing_their_names_takes_no_torch() -> None:
    found = "import sys, services.worker.engine.kinds; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", found], check=True)


MAKE = """
import importlib, sys
from pathlib import Path
from services.worker.engine.kinds import EngineParts, device_of, engine_kind
name, path = sys.argv[1:]
for module in (*engine_kind(name).modules, "services.worker.service"):
    importlib.import_module(module)
from services.worker.engine.kv_pool import KvPool
from services.worker.memory.arena import Arena
from shared.checkpoint import inspect_checkpoint
layout, device = inspect_checkpoint(Path(path), with_hash=False).layout, device_of(name, "cpu")
arena, kv = Arena(device.allocate(layout.num_bytes)), KvPool(device.allocate(1 << 20))
before = set(sys.modules)
parts = EngineParts(layout=layout, arena=arena, kv=kv, device=device, num_blocks=4, block_size=4)
engine_kind(name).make(parts)
print(sorted(module for module in set(sys.modules) - before if module.startswith("services.")))
"""


@pytest.mark.parametrize("name", [name for name in ENGINES if name != NO_ENGINE])
def test_what_an_engine_is_made_of_is_imported_at_a_process_start_not_in_its_first_load(name: str) -> None:
    command = [sys.executable, "-c", MAKE, name, str(tiny_checkpoint("llama"))]
    made = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert made.stdout.strip() == "[]"


@pytest.mark.parametrize("changes", [{"engine": "of-a-later-version"}, {"device": "tpu-v9"}])
def test_what_is_registered_may_be_of_a_later_version(changes: dict[str, str]) -> None:
    info = msgspec.structs.replace(worker("w"), **changes)
    assert msgspec.json.decode(msgspec.json.encode(info), type=WorkerInfo) == info
    known = msgspec.structs.replace(profile(), **changes)
    assert msgspec.json.decode(msgspec.json.encode(known), type=type(known)) == known


def test_links_of_a_device_that_is_not_known_are_taken_for_slow() -> None:
    unknown = msgspec.structs.replace(
        worker("w"), device="tpu-v9", scale_up_gbps=None, host_link_gbps=None, scale_up_domain="domain"
    )
    topology = topology_of([unknown])
    assert not topology.refused
    assert topology.gpus["w"].host_link_gbps == min(HOST_LINK_GBPS.values())
    assert topology.gpus["w"].scale_up_gbps == min(SCALE_UP_GBPS.values())


@pytest.mark.parametrize("name", ["", "a" * 65])
def test_a_name_that_is_none_is_no_registration(name: str) -> None:
    info = msgspec.structs.replace(worker("w"), engine=name)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(info), type=WorkerInfo)


def test_where_there_is_no_engine_none_is_made() -> None:
    with pytest.raises(Conflict, match=r"does not offer the system's own engine \(BLITZ_WORKER_ENGINE\)"):
        engine_kind(NO_ENGINE).make(None)  # type: ignore[arg-type]
