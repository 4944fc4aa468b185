from __future__ import annotations

import base64

import pytest
import yaml

from compose.credentials import make
from compose.secrets_yaml import NATS_MEMBERS, SECRETS_YAML
from tests.compose.kubernetes.rules import Secrets


@pytest.fixture(scope="session")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Secrets:
    """As the command makes them, and each key as a file."""
    folder = tmp_path_factory.mktemp("credentials")
    make(folder, kubernetes=True, cluster=NATS_MEMBERS)
    mounted = tmp_path_factory.mktemp("mounted")
    keys: dict[str, frozenset[str]] = {}
    for secret in yaml.safe_load_all((folder / SECRETS_YAML).read_text()):
        found = dict(secret.get("stringData", {}))
        found |= {key: base64.b64decode(value).decode() for key, value in secret.get("data", {}).items()}
        keys[secret["metadata"]["name"]] = frozenset(found)
        for key, text in found.items():
            (mounted / key).write_text(text)
    (mounted / "keys.toml").write_text('[[keys]]\nname = "team-a"\nkey = "sk-1"\n')
    return Secrets(keys, mounted)
