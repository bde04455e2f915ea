"""Policies that look at live requests and choose, without any effect: what a switch would do, before somebody switches.

Each shadow has a policy object and a random source of its own and sees the very Situation and Terms of the live decision. Its state follows
its own picks, the workers' follows the live ones: so a shadow tells who it would have chosen in our state, not the state that it would
have made (cache contents and queues drift apart; simulator and what-if answer that).

A shadow can't hurt: what it raises is counted, logged the first time, and gives no pick. Its cost is measured; the number is bounded by
`MOST_SHADOWS` (a baseline takes some 5 to 15 us at 64 workers).
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from router.policy.choice import Policy
from router.policy.cost import Situation, Terms, most_cached_tokens

log = logging.getLogger(__name__)

MOST_SHADOWS = 8


@dataclass(frozen=True, slots=True)
class ShadowPick:
    """Whom a shadow would have chosen: target number; None: nobody, or it failed."""

    policy: str
    version: str
    target_number: int | None


@dataclass(slots=True)
class Shadow:
    """One shadow and its counts, cumulative since it was set."""

    policy: Policy
    rng: random.Random
    decisions: int = 0
    agreed: int = 0
    errors: int = 0
    seconds: float = 0.0
    cached_tokens: int = 0  # forecast where it would have sent them
    chosen_cached_tokens: int = 0  # forecast where the same requests went
    error: str | None = field(default=None, repr=False)  # the newest


class Shadows:
    """The shadows of one pool."""

    def __init__(self, policies: Sequence[Policy] = (), seed: int = 0, clock: Callable[[], float] = time.perf_counter) -> None:
        """Raises ValueError for more than MOST_SHADOWS."""
        if len(policies) > MOST_SHADOWS:
            raise ValueError(f"{len(policies)} shadow policies are too many: at most {MOST_SHADOWS}")
        self._shadows = tuple(Shadow(p, random.Random(f"{seed}/{p.name}")) for p in policies)
        self._clock = clock

    def __iter__(self) -> Iterator[Shadow]:
        return iter(self._shadows)

    def __len__(self) -> int:
        return len(self._shadows)

    def picks(self, now: Situation, terms: Terms, chosen: int) -> tuple[ShadowPick, ...]:
        """What each would have done; chosen: the target that the live policy took."""
        if not self._shadows:
            return ()
        most = most_cached_tokens(now.prompt_tokens, now.block_size)
        at_s = self._clock()
        out = []
        for shadow in self._shadows:
            number: int | None = None
            try:
                choice = shadow.policy.choose(now, terms, shadow.rng)
                if choice is not None:
                    number = choice.worker
                    shadow.cached_tokens += min(int(now.expected[number]), most)
                    shadow.chosen_cached_tokens += min(int(now.expected[chosen]), most)
                    shadow.agreed += number == chosen
                shadow.decisions += 1
            except Exception as e:  # whatever a shadow does, the request goes on
                if not shadow.errors:
                    log.exception("the shadow policy %s failed; further failures are counted", shadow.policy.name)
                shadow.errors += 1
                shadow.error = f"{type(e).__name__}: {e}"[:500]
            out.append(ShadowPick(shadow.policy.name, shadow.policy.version, number))
            ended_s = self._clock()
            shadow.seconds += ended_s - at_s
            at_s = ended_s
        return tuple(out)
