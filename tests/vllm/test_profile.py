"""What ``blitzscale profile`` says of a vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shared.checkpoint import inspect_checkpoint
from shared.profile import read_profile
from tests.vllm.conftest import PATIENCE_S, PYTHON


def test_a_profile_is_of_the_model_as_vllm_serves_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLITZ_VLLM_PYTHON", PYTHON)
    arguments = tmp_path / "args.json"
    arguments.write_text(json.dumps({"max_model_len": 256, "max_num_seqs": 4, "kv_cache_gib": 1}))
    file = tmp_path / "m.profile.json"
    command = [sys.executable, "-m", "compose", "profile", str(checkpoint), "--engine", "vllm", "--quick"]
    with subprocess.Popen(
        [*command, "--engine-args", str(arguments), "--out", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        said, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, said.decode()
    found = read_profile(file)
    generic = inspect_checkpoint(checkpoint, generic=True)
    found.check(layout_hash=generic.layout.hash, engine="vllm", device="cpu")
    assert (found.model_hash, found.num_layers) == (generic.model_hash, 8)
    assert {point.num_requests for point in found.decode} == {1, 4}
    assert max(point.prompt_tokens for point in found.prefill) < 256
    assert all(point.seconds > 0 for point in (*found.prefill, *found.decode))
    listed = subprocess.run(["ps", "-eo", "args"], check=True, capture_output=True, text=True).stdout
    assert not [line for line in listed.splitlines() if "blitz_vllm" in line and line.endswith(f" {process.pid}")]
