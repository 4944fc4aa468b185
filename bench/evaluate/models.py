"""The models that an evaluation plays, with their objectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType

from bench.replay.objectives import Slo
from bench.sim.architectures import CONFIGS
from bench.sim.models import MODELS as KNOWN_MODELS
from bench.sim.models import KnownModel
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


def _model(name: str, known: KnownModel) -> Model:
    """As the simulator has it, on as many GPUs as there unless others are asked for."""
    num_gpus, objectives = next(iter(known.objectives.items()))
    return Model(name, known.architecture, num_gpus, Slo(*objectives))


MODELS: Mapping[str, Model] = MappingProxyType({name: _model(name, known) for name, known in KNOWN_MODELS.items()})


def find_model(name: str) -> Model:
    """Raises ``BadRequest``, naming those that there are."""
    if name not in MODELS:
        raise BadRequest(f"there is no model {name!r}: {', '.join(MODELS)}", param="model")
    return MODELS[name]
