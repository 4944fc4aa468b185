"""How many prompt tokens a step takes: as many as it may, and where requests decode in it, as few as their objective
for the time between two tokens (TBT) asks for.

A step in which nothing decodes has its full budget of tokens: nobody waits for its end. One in which requests decode
takes prompt tokens for the time that their objective leaves, by what decodes and prompts were measured to take (or
expected to, from a profile). Never fewer than keep prompts going, whatever is measured and however many decode; and at
most twice as many as the last such step, so that a wrong figure does little harm before the next one corrects it.
"""

from __future__ import annotations

from math import inf

from services.worker.core.scheduling.prompt_cost import PromptCost, num_pairs
from services.worker.core.scheduling.schedule import SchedulerConfig
from services.worker.core.scheduling.speed import SpeedEstimator
from shared.profile import Profile

USED_SHARE = 0.8
"""Of the objective. The rest is for what steps vary by, and for the way to the client."""
PROMPTS_SHARE = 0.1
"""Of the objective, that prompts get even if decodes alone take longer."""
LEAST_TOKENS = 16
"""That they get however slow they are."""
FIRST_TOKENS = 64
"""Of the first step in which requests decode, at most."""
ROUND_TOKENS = 16
"""Whole blocks of usual size, if there are more."""
LEAST_SHARE = 0.02
"""Of a step's time, that its prompt tokens are taken to cost at least: decodes may have taken less than expected."""


class StepBudget:
    """Of one step: what is left of it, and what its prompts took."""

    def __init__(
        self, tokens: int, chunk_tokens: int, cost: PromptCost, *, seconds: float = inf, most: int = 0
    ) -> None:
        """``seconds``: for prompts; infinite where nothing decodes. ``most``: prompt tokens then."""
        self._tokens = tokens
        self._chunk_tokens = chunk_tokens
        self._cost = cost
        self._seconds = seconds
        self._most = most
        self.num_tokens = 0
        """Taken."""
        self.num_pairs = 0

    def room(self, start: int = 0) -> int:
        """Tokens that a prompt may take from position ``start`` on."""
        room = min(self._tokens - self.num_tokens, self._chunk_tokens)
        if self._seconds == inf:
            return max(0, room)
        left_s = self._seconds - self._cost.seconds(self.num_tokens, self.num_pairs)
        within = self._cost.tokens_within(left_s, start)
        within = min(within // ROUND_TOKENS * ROUND_TOKENS, self._most - self.num_tokens)
        return max(0, min(room, max(within, LEAST_TOKENS - self.num_tokens)))

    def take(self, start: int, wanted: int) -> int:
        """Give a prompt its share of the step, at most ``wanted``; 0: nothing is left."""
        count = min(wanted, self.room(start))
        self.num_tokens += count
        self.num_pairs += num_pairs(start, count)
        return count


class StepBudgets:
    """Of one scheduler: learns from each step what the next one may take."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._last_tokens = 0
        self.slo_tbt_s = 0.0
        """The objective; 0: none, every step has its full budget."""
        self.speed = SpeedEstimator()
        self.cost = PromptCost()
        self._expected_decode_s = (0.0, 0.0)

    def keep_tbt(self, slo_tbt_s: float) -> None:
        """The objective is this from now on."""
        self.slo_tbt_s = slo_tbt_s

    def expect(self, profile: Profile) -> None:
        """What steps of such an instance take, until some have been measured here."""
        self.cost.expect(profile.prefill_fit.token_s, profile.prefill_fit.pair_s)
        self._expected_decode_s = profile.decode_fit.base_s, profile.decode_fit.request_s

    def next(self, num_decodes: int = 0) -> StepBudget:
        """For the prompts of a step in which so many requests decode."""
        config, slo_s = self._config, self.slo_tbt_s
        tokens = config.max_batch_tokens - num_decodes
        if not num_decodes or slo_s <= 0:
            return StepBudget(tokens, config.prefill_chunk_tokens, self.cost)
        base_s, request_s = self._expected_decode_s
        decodes_s = self.speed.decode_s(num_decodes) or base_s + num_decodes * request_s
        left_s = USED_SHARE * slo_s - decodes_s
        return StepBudget(
            tokens,
            config.prefill_chunk_tokens,
            self.cost,
            seconds=max(left_s, PROMPTS_SHARE * slo_s),
            most=max(FIRST_TOKENS, 2 * self._last_tokens),
        )

    def stepped(self, num_tokens: int, num_pairs: int, num_decodes: int, seconds: float) -> None:
        """A step of so many prompt tokens, which attended to so many, and so many decodes took so long."""
        self.speed.stepped(num_tokens, num_decodes, seconds)
        if num_tokens:
            if num_decodes:
                self._last_tokens = num_tokens
            # The weights are read once, for prompts and decodes together.
            others_s = self.speed.decode_s(num_decodes)
            self.cost.measured(num_tokens, num_pairs, max(seconds - others_s, LEAST_SHARE * seconds))
