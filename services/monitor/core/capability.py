"""What one instance of a model can do.

The figures come from its profile (``shared.profile``), at the length of the prompts that come and the contexts that
run; else from what is configured, else from what instances report: the fastest of them, since an instance that has
hardly begun has measured only small steps. Without a current report the last one counts, and before the first an
assumed speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from services.monitor.core.need import Capability, max_decodes
from services.monitor.core.policy import DemandPolicy
from services.monitor.core.reported import context_tokens, is_measured
from shared.messages.load import LoadReport
from shared.profile import Profile


class Estimate:
    """Remembers what was reported."""

    def __init__(self, policy: DemandPolicy) -> None:
        self._policy = policy
        self.profile: Profile | None = None
        """Measured beforehand."""
        self._tokens_per_s = 0.0
        self._decode_s = (0.0, 0.0)
        """Base and share of a request in a decode step. Both figures are the last that any instance reported."""
        self._measured: tuple[object, Capability] | None = None
        """What the capability follows from, and it."""

    def tokens_per_s(self, prompt_tokens: float) -> float:
        """Prompt tokens per second, of prompts of that length: the best figure available."""
        if self.profile is not None:
            return self.profile.prefill_tokens_per_s(prompt_tokens)
        return self._policy.prefill_tokens_per_s or self._tokens_per_s or self._policy.assumed_tokens_per_s

    def capability(
        self,
        prefilling: Sequence[LoadReport],
        decoding: Sequence[LoadReport],
        *,
        prompt_tokens: float,
        slo_tbt_s: float,
    ) -> Capability:
        """``prefilling``, ``decoding``: reports of instances that serve, and do this."""
        speeds = [r.prefill_tokens_per_s for r in prefilling]
        steps = [(r.decode_base_s, r.decode_request_s) for r in decoding]
        profiled = self.profile and (self.profile, prompt_tokens, context_tokens(decoding))
        basis = speeds, steps, profiled, slo_tbt_s
        if self._measured is not None and self._measured[0] == basis:
            return self._measured[1]
        self._tokens_per_s = max(filter(is_measured, speeds), default=0.0) or self._tokens_per_s
        measured = [step for step in steps if is_measured(step[1])]
        if measured:
            self._decode_s = max(measured, key=lambda step: max_decodes(step[0], step[1], slo_tbt_s))
        base_s, request_s = self._decode_s
        if self.profile is not None:
            base_s, request_s = self.profile.decode_line(context_tokens(decoding), slo_tbt_s)
        capability = Capability(
            self.tokens_per_s(prompt_tokens) * self._policy.utilisation,
            max_decodes(base_s, request_s, slo_tbt_s),
            self._policy.running_limit or inf,
            base_s,
            request_s,
        )
        self._measured = basis, capability
        return capability

    @property
    def load_s(self) -> float:
        """To fetch the model again, as the profile says; 0: it does not."""
        return self.profile.load_s if self.profile is not None else 0.0
