"""All that may happen to requests, in little room, where many texts begin alike: what a request attends to is always
its own text's KV, of its own scope, and no block is lost, given twice, or given up while anybody holds it."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from services.worker.core.scheduling.sequence import ActiveSequence
from shared.prefixes import prefix_root
from tests.services.worker.core.scheduling.pipeline import placed_request
from tests.services.worker.core.scheduling.test_two_in_flight_machine import TwoInFlight

TEXTS = ("a", "ac", "ad", "d")
SCOPES = ("", "", "one")


class PrefixCached(TwoInFlight):
    prefix_cache = True
    chosen = 0

    def make(self, prompt_tokens: int, max_tokens: int, **changes: object) -> ActiveSequence:
        number = len(self.all)
        scope = SCOPES[self.chosen // len(TEXTS) % len(SCOPES)]
        name = f"{TEXTS[self.chosen % len(TEXTS)]}:{number}@{scope}"
        root = prefix_root("model", scope)
        sequence = placed_request(name, prompt_tokens, max_tokens, gateway=f"g{number % 2}", cache_root=root, **changes)  # type: ignore[arg-type]
        self.all[name], self.tokens[name] = sequence, []
        return sequence

    @rule(chosen=st.integers(0, len(TEXTS) * len(SCOPES) - 1))
    def choose_text_and_scope(self, chosen: int) -> None:
        """Of the requests that come from now on."""
        self.chosen = chosen

    @invariant()
    def what_is_found_is_less_than_the_context(self) -> None:
        for sequence in self.scheduler.table.running:
            assert sequence.num_cached < sequence.num_tokens
            assert sequence.num_computed < sequence.num_tokens or sequence.finished


TestPrefixCached = PrefixCached.TestCase
TestPrefixCached.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
