"""Hidden states and KV between the members of a pair, as flows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.sim.flows import Flow, Network
from bench.sim.instance import SimInstance
from bench.sim.processes import Signal, Steps
from bench.sim.sharing import Resource
from shared.messages.traffic import Purpose


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPaths:
    """How hidden states and KV get from one member to the other."""

    network: Network
    path: Callable[[SimInstance, SimInstance], tuple[Resource, ...]]
    hidden_bytes_per_token: int
    message_s: float = 0.0003
    """A question between workers, or its answer."""


@dataclass(slots=True, eq=False)
class Sent:
    """On its way to the other member, or there."""

    flow: Flow | None = None
    arrived: bool = False


class PairTensors:
    """Of one pair."""

    def __init__(self, paths: PairPaths, changed: Signal) -> None:
        """``changed`` fires when something has arrived."""
        self._paths = paths
        self._changed = changed
        self._on_their_way: list[Sent] = []

    def send(self, sender: SimInstance, receiver: SimInstance, num_bytes: float, purpose: Purpose) -> Sent:
        """From now on."""
        sent = Sent()

        def arrived(_: Flow) -> None:
            sent.arrived = True
            self._on_their_way.remove(sent)
            self._changed.fire()

        self._on_their_way.append(sent)
        path = self._paths.path(sender, receiver)
        sent.flow = self._paths.network.start(path, num_bytes, on_end=arrived, purpose=purpose)
        return sent

    def send_hidden(self, sender: SimInstance, receiver: SimInstance, num_tokens: int) -> Sent:
        """Of so many tokens."""
        return self.send(sender, receiver, num_tokens * self._paths.hidden_bytes_per_token, "activations")

    def until_arrived(self, sent: Sent) -> Steps:
        while not sent.arrived:
            yield self._changed

    def abort(self) -> None:
        """What is on its way does not arrive."""
        for sent in self._on_their_way:
            if sent.flow is not None:
                self._paths.network.abort(sent.flow)
        self._on_their_way.clear()


def on_engine(instance: SimInstance, function: Callable[[], object], changed: Signal) -> Steps:
    """Run it on the engine's thread, between two layers; its result."""
    results: list[object] = []

    def run() -> None:
        results.append(function())
        changed.fire()

    instance.call(run, between_layers=True)
    while not results:
        yield changed
    return results[0]
