"""What requests may not ask of the engine that serves their model."""

from __future__ import annotations

from collections.abc import Iterator

from services.gateway.request_bodies.options import Options
from shared.engines import EngineTraits
from shared.errors import UnsupportedParameter


def refuse_untaken(options: Options, traits: EngineTraits) -> None:
    """Raises ``UnsupportedParameter`` naming the first parameter that the engine does not take."""
    if not traits.refuses:
        return
    for param in _asked(options):
        if param in traits.refuses:
            raise UnsupportedParameter(f"{param}: the engine {traits.name} of this model does not take it", param=param)


def _asked(options: Options) -> Iterator[str]:
    """Parameters of the request, as its client calls them, that not every engine takes."""
    if options.priority:
        yield "priority"
    if options.prompt_logprobs is not None:
        yield "prompt_logprobs"
    if options.echo_logprobs is not None:
        yield "echo"
