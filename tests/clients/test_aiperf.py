"""aiperf: conversations of two turns, streamed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.clients.names import KEY, RANDOM

CONVERSATIONS, TURNS, OUTPUT_TOKENS = 3, 2, 8


def hub_of(folder: Path, model: Path) -> Path:
    """A cache of Hugging Face's with the model as ``local/random``: offline, aiperf takes no other tokenizer."""
    repository, revision = folder / "hub" / f"models--local--{RANDOM}", "0" * 40
    for name in ("refs", "snapshots"):
        (repository / name).mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    (repository / "snapshots" / revision).symlink_to(model)
    return folder


def test_conversations_are_measured(served: Any, tmp_path: Path) -> None:
    arguments = {
        "--model": RANDOM,
        "--url": served.url,
        "--endpoint-type": "chat",
        "--api-key": KEY,
        "--tokenizer": f"local/{RANDOM}",
        "--num-conversations": CONVERSATIONS,
        "--conversation-turn-mean": TURNS,
        "--conversation-turn-stddev": 0,
        "--synthetic-input-tokens-mean": 20,
        "--output-tokens-mean": OUTPUT_TOKENS,
        "--extra-inputs": "ignore_eos:true",
        "--concurrency": 2,
        "--ui": "none",
        "--output-artifact-dir": tmp_path / "found",
    }
    flags = ["--streaming", "--use-server-token-count", "--no-gpu-telemetry", "--no-server-metrics"]
    command = [Path(sys.executable).parent / "aiperf", "profile", *flags]
    command += [str(part) for pair in arguments.items() for part in pair]
    hub = hub_of(tmp_path / "hub", Path(served.models[RANDOM]))
    subprocess.run(command, env=os.environ | {"HF_HOME": str(hub), "HF_HUB_OFFLINE": "1"}, cwd=tmp_path, check=True)
    found = json.loads((tmp_path / "found" / "profile_export_aiperf.json").read_text())
    assert found["request_count"]["avg"] == CONVERSATIONS * TURNS
    assert found["output_sequence_length"]["avg"] == OUTPUT_TOKENS
    assert not found["error_summary"]
    assert found["time_to_first_token"]["avg"] > 0
