"""Variables of the environment that no service reads: those of the commands and of docker-compose."""

from __future__ import annotations

from compose.config import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE, DEFAULT_URL, URL_VARIABLE
from shared.settings import Setting

OF_COMMANDS = (
    Setting(
        URL_VARIABLE,
        "Gateway for `status`, `pool`, `workers`, `scale`, `models`, `profile` and `replay`; `--url` wins.",
        f"`{DEFAULT_URL}`",
    ),
    Setting(
        ADMIN_KEY_VARIABLE,
        "Key that these send to `/admin`. `blitzscale up` gives it to the gateway where neither "
        "`BLITZ_ADMIN_KEYS` nor `BLITZ_ADMIN_KEYS_FILE` is set.",
    ),
    Setting(API_KEY_VARIABLE, "Key that `replay` sends to `/v1`; or `OPENAI_API_KEY`."),
)
OF_CONTAINERS = (
    Setting(
        "BLITZ_MODELS",
        "Folder of checkpoint directories, mounted read-only at the same path in all containers that read it.",
        "required",
    ),
    Setting(ADMIN_KEY_VARIABLE, "Key for `/admin`.", "required"),
    Setting("BLITZ_CREDENTIALS", "Folder that `blitzscale credentials` wrote.", "required"),
    Setting("BLITZ_PROFILES", "Folder of profiles, mounted read-only in monitor, planner and workers."),
    Setting(
        "BLITZ_WORKERS",
        "Workers in the worker container (`python -m compose.workers`). Their ids are `BLITZ_WORKER_HOST` and a "
        "number, their health ports follow `BLITZ_HEALTH_PORT`, and their arenas, KV caches and host copies must fit "
        "into its memory limit.",
        "`1` (compose file: `2`)",
    ),
    Setting("BLITZ_BIND", "Address at which the gateway is published.", "`127.0.0.1`"),
    Setting("BLITZ_PORT", "Its port; a range (`8000-8001`) for several gateways.", "`8000`"),
    Setting("BLITZ_WORKER_MEMORY", "Memory limit of the worker container, such as `48g`; 0: none.", "`0`"),
    Setting("BLITZ_SHM_SIZE", "`/dev/shm` that the workers share.", "`8gb`"),
    Setting("BLITZ_GPU", "Device of the worker of the GPU file and of vLLM's.", "`0`"),
    Setting("PYTHON_IMAGE", "Build: base image.", "`python:3.11-slim`"),
    Setting("PIP_INDEX_URL", "Build: where Python packages come from.", "pip's"),
    Setting("PIP_EXTRA_INDEX_URL", "Build: the same, in addition.", "pip's"),
    Setting("PIP_TRUSTED_HOST", "Build: host that needs no valid certificate.", "pip's"),
    Setting("TORCH_INDEX", "Build: where torch comes from.", "PyTorch's CPU index (GPU file: pip's)"),
    Setting("DEVICE", "Build, GPU file: `gpu-cu12` or `gpu-cu13`, as the host's driver has it.", "`gpu-cu13`"),
    Setting("VLLM_IMAGE", "Build, vLLM's file: base image.", "`vllm/vllm-openai:v0.32.0`"),
    Setting("VLLM_PYTHON", "Build, vLLM's file: the base image's Python that has vLLM.", "`/usr/bin/python3`"),
)
