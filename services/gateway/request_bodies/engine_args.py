"""The ``engine_args`` of a model that is added: what is not among them is refused by name, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from services.gateway.request_bodies.body import read_json
from shared.engine_args import EngineArgs
from shared.errors import BadRequest, PayloadTooLarge

MAX_BYTES = 4096
"""Of JSON."""
_MAX_SHOWN = 80
_PARAM = "engine_args"
_CODE = "it would have the engine run code that is not its own"
_PLACE = "it names a host, a path or an address: the worker says where the engine runs and what it reads"
_OWN = "the worker sets it"
_REFUSED: Mapping[str, str] = {
    "trust_remote_code": _CODE,
    "hf_overrides": _CODE,
    "worker_cls": _CODE,
    "worker_extension_cls": _CODE,
    "scheduler_cls": _CODE,
    "logits_processors": _CODE,
    "logits_processor_pattern": _CODE,
    "model_impl": _CODE,
    "additional_config": _CODE,
    "compilation_config": _CODE,
    "tool_parser_plugin": _CODE,
    "reasoning_parser_plugin": _CODE,
    "middleware": _CODE,
    "distributed_executor_backend": _CODE,
    "speculative_config": _PLACE,
    "kv_transfer_config": _PLACE,
    "kv_events_config": _PLACE,
    "ec_transfer_config": _PLACE,
    "model": _PLACE,
    "tokenizer": _PLACE,
    "hf_config_path": _PLACE,
    "hf_token": _PLACE,
    "download_dir": _PLACE,
    "revision": _PLACE,
    "code_revision": _PLACE,
    "tokenizer_revision": _PLACE,
    "allowed_local_media_path": _PLACE,
    "data_parallel_address": _PLACE,
    "otlp_traces_endpoint": _PLACE,
    "lora_modules": _PLACE,
    "chat_template": _PLACE,
    "host": _PLACE,
    "port": _PLACE,
    "load_format": _OWN,
    "model_loader_extra_config": _OWN,
    "served_model_name": _OWN,
    "gpu_memory_utilization": f"{_OWN} (kv_cache_gib says how much KV)",
    "tensor_parallel_size": _OWN,
    "pipeline_parallel_size": _OWN,
    "data_parallel_size": _OWN,
}
"""What people may know of vLLM, and why it cannot be set here."""


def read_engine_args(engine: str, given: Mapping[str, Any] | None) -> EngineArgs | None:
    """Of a model of that engine, checked; None if there are none.

    Raises ``BadRequest`` and ``PayloadTooLarge``, naming ``engine_args`` or one of them."""
    if not given:
        return None
    if not engine:
        raise BadRequest(f"{_PARAM} is only for a model of another engine than the system's own", param=_PARAM)
    for name in given:
        if name not in EngineArgs.__struct_fields__:
            raise _refusal(name)
    json = msgspec.json.encode(given)
    if len(json) > MAX_BYTES:
        raise PayloadTooLarge(f"{_PARAM} has {len(json)} bytes; at most {MAX_BYTES} are allowed", param=_PARAM)
    read: EngineArgs = read_json(json, EngineArgs, _PARAM)
    return read if read.as_mapping() else None


def _refusal(name: str) -> BadRequest:
    shown = name if len(name) <= _MAX_SHOWN else f"{name[:_MAX_SHOWN]}..."
    # As the command line of vLLM has them.
    why = _REFUSED.get(name.replace("-", "_"), "it is not one of those that can be set")
    known = ", ".join(EngineArgs.__struct_fields__)
    return BadRequest(f"{_PARAM}.{shown} is refused: {why}; there are {known}", param=f"{_PARAM}.{shown}")
