"""How long a step takes. Prefill seconds of `u` new tokens after `h` cached ones: `a + b*u + c*u*(h + u/2)`, the last term being
attention over what is there already; a decode step costs a base and a little per sequence. The numbers are those of the
design's cost model (about an 8B model on one GPU). What a step holds is the scheduler's business, not decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simulator.scheduler import Step


@dataclass(frozen=True, slots=True)
class StepCost:
    prefill_base_s: float = 0.015
    prefill_token_s: float = 1 / 14_000
    prefill_attention_s: float = 1.3e-9  # per pair of new token and token before it
    decode_base_s: float = 0.018
    decode_sequence_s: float = 0.0002
    speed: float = 1.0  # 2 = everything in half the time
    instant: bool = False

    def prefill_s(self, new_tokens: int, cached_tokens: int) -> float:
        """Seconds of one prefill alone in its step."""
        return self._prefills_s([(new_tokens, cached_tokens)]) / self.speed

    def step_s(self, step: Step) -> float:
        """Seconds of a whole step."""
        if self.instant or not step.work:
            return 0.0
        seconds = self._prefills_s([(new, there) for _, new, there in step.prefills])
        if step.decodes:
            seconds += self.decode_base_s + self.decode_sequence_s * step.decodes
        return seconds / self.speed

    def _prefills_s(self, prefills: Sequence[tuple[int, int]]) -> float:
        if not prefills:
            return 0.0
        return self.prefill_base_s + sum(self.prefill_token_s * u + self.prefill_attention_s * u * (h + u / 2) for u, h in prefills)
