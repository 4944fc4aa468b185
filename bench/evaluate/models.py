"""The models that an evaluation plays, with their objectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType

from bench.replay.objectives import Slo
from bench.sim.architectures import CONFIGS
from shared.errors import BadRequest
from shared.profile import Profile, read_profile


@dataclass(frozen=True, slots=True)
class Model:
    """As the paper serves it (section 6)."""

    name: str
    architecture: str
    """Of ``bench.sim.architectures``."""
    num_gpus: int
    """Of an instance."""
    slo: Slo
    """Absolute."""

    @property
    def hidden_size(self) -> int:
        return int(CONFIGS[self.architecture]["hidden_size"])

    @property
    def profile_name(self) -> str:
        """Of ``bench/sim/profiles``: both clusters of the paper have A100 (A800 differ in links)."""
        return f"{self.architecture}-tp{self.num_gpus}-a100"

    def profile(self) -> Profile:
        """Raises ``BadProfile``."""
        with resources.as_file(resources.files("bench.sim") / "profiles" / f"{self.profile_name}.json") as file:
            return read_profile(file)


_ALL = (
    # The paper's objectives (section 2.2). It names none for 24B: on one GPU it is as fast as 72B on four.
    Model("llama3-8b", "llama-3-8b", 1, Slo(0.450, 0.150)),
    Model("mistral-24b", "mistral-24b", 1, Slo(1.250, 0.200)),
    Model("qwen2.5-72b", "qwen2.5-72b", 4, Slo(1.250, 0.200)),
)
MODELS: Mapping[str, Model] = MappingProxyType({model.name: model for model in _ALL})


def find_model(name: str) -> Model:
    """Raises ``BadRequest``, naming those that there are."""
    if name not in MODELS:
        raise BadRequest(f"there is no model {name!r}: {', '.join(MODELS)}", param="model")
    return MODELS[name]
