"""Each model family and attention backend is found by its name."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest

from services.worker.device.host import HOST
from services.worker.engine.attention.backend import AttentionBackend
from services.worker.engine.attention.kinds import ATTENTION, BY_DEVICE, attention_backend, attention_for
from services.worker.engine.kv_pool import KvPool
from services.worker.engine.models.forward import Forward, forward_of
from services.worker.memory.arena import Arena
from shared.checkpoint import inspect_checkpoint
from shared.errors import BadRequest
from shared.models.families import FAMILIES
from shared.models.family import ModelFamily
from tests.checkpoints import tiny_checkpoint


def has(protocol: type, thing: object) -> bool:
    """Whether it has the protocol's methods, with parameters of the same names."""
    wanted = {name: f for name, f in vars(protocol).items() if inspect.isfunction(f) and not name.startswith("_")}
    return all(
        list(inspect.signature(getattr(thing, name)).parameters) == list(inspect.signature(f).parameters)[1:]
        for name, f in wanted.items()
    )


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_has_a_module_of_its_name_that_describes_it_and_one_that_computes_it(family: ModelFamily) -> None:
    assert importlib.import_module(f"shared.models.{family.name}").FAMILY is family
    assert callable(importlib.import_module(f"services.worker.engine.models.{family.name}").MAKE)


def test_what_a_model_is_takes_no_torch_to_know() -> None:
    found = "import sys, shared.models.families; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", found], check=True)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2"])
def test_an_engine_computes_with_the_family_of_its_layout(kind: str) -> None:
    layout = inspect_checkpoint(tiny_checkpoint(kind), with_hash=False).layout
    arena, pool = Arena(HOST.allocate(layout.num_bytes)), KvPool(HOST.allocate(1 << 20))
    attention = attention_backend(BY_DEVICE, "cpu")(layout, 16, HOST.tensors)
    assert has(Forward, forward_of(layout, arena, pool.view(layout, 16), attention))


@pytest.mark.parametrize("name", list(ATTENTION))
def test_a_backend_is_made_for_a_layout(name: str) -> None:
    layout = inspect_checkpoint(tiny_checkpoint("llama"), with_hash=False).layout
    assert has(AttentionBackend, attention_backend(name, ATTENTION[name][0])(layout, 16, HOST.tensors))


def test_a_device_has_its_own_backend_unless_another_one_is_named() -> None:
    assert [attention_for(BY_DEVICE, device) for device in ("cpu", "cuda")] == ["torch_cpu", "flashinfer"]
    assert attention_for("torch_plain", "cuda") == "torch_plain"


def test_a_backend_that_there_is_not_or_that_does_not_run_there_is_refused() -> None:
    with pytest.raises(BadRequest, match="no attention backend 'fast', but torch_cpu"):
        attention_backend("fast", "cpu")
    with pytest.raises(BadRequest, match="'torch_cpu' does not run on cuda, but flashinfer, torch_plain"):
        attention_backend("torch_cpu", "cuda")
