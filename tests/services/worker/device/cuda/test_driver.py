"""The driver, where there is no GPU: what it asks PyTorch for is there."""

from __future__ import annotations

import ast
import inspect

import torch

from services.worker.device.cuda import driver


def test_what_is_asked_of_pytorch_exists() -> None:
    asked = {
        node.attr
        for node in ast.walk(ast.parse(inspect.getsource(driver)))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == "_cuda"
    }
    assert {"Event", "Stream", "CUDAGraph"} <= asked
    assert not [name for name in sorted(asked) if not hasattr(torch.cuda, name)]
