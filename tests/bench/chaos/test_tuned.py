from __future__ import annotations

from pathlib import Path

from bench.chaos.tuned import make_tuned
from compose.demo_model import ensure_demo_model
from shared.checkpoint import inspect_checkpoint


def test_other_weights_in_the_same_shape_with_the_same_files(tmp_path: Path) -> None:
    demo = ensure_demo_model(tmp_path)
    tuned, another = make_tuned(demo, tmp_path, 0), make_tuned(demo, tmp_path, 1)
    one, other = inspect_checkpoint(demo, generic=True), inspect_checkpoint(tuned, generic=True)
    assert one.layout.hash == other.layout.hash
    assert len({one.model_hash, other.model_hash, inspect_checkpoint(another, generic=True).model_hash}) == 3
    for file in demo.iterdir():
        assert (file.suffix == ".safetensors") == (file.read_bytes() != (tuned / file.name).read_bytes())
