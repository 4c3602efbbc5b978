"""`DraftingPolicy`, which stops drafting where measured steps say that texts are written faster without.

Steps of requests that decode are timed, those that verify drafts and those that do not, by about the number of
requests. Drafting pays if the tokens that a verification gives a request are more, by as much as it takes longer. To
know what a step without drafts takes, a few are run now and then; the more often drafting has won, the seldomer.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import fmean, median

FIRST_PROBE = 64
"""Steps with drafts before the first steps without."""
NUM_PROBES = 4
"""Steps without drafts in a row, to measure them."""
NUM_TRIALS = 16
"""Steps with drafts in a row, before drafting that was stopped is judged again."""
LONGEST = 4096
"""The most steps from one judgement to the next; the distance doubles each time that the judgement is the same."""
MARGIN = 1.05
"""How much faster steps without drafts must be: less is noise."""


@dataclass(slots=True)
class _Measured:
    """What is known of about as many requests."""

    drafted: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=64))  # seconds, tokens a request
    plain: deque[float] = field(default_factory=lambda: deque(maxlen=16))  # seconds
    steps_left: int = field(default_factory=lambda: FIRST_PROBE)  # of the present kind, until the other is tried
    distance: int = FIRST_PROBE
    is_stopped: bool = False
    num_tried: int = 0  # steps of the other kind that were measured since `steps_left` was used up
    reason: str = ""


class DraftingPolicy:
    """Whether the next step drafts. Knows nothing of time but what it is told, and changes no token."""

    def __init__(self) -> None:
        self._by_size: dict[int, _Measured] = {}
        self._last: _Measured | None = None
        self.num_stopped_steps = 0
        """Steps that drafted nothing because of a judgement."""

    @property
    def reason(self) -> str:
        """Why batches like the last one are not drafted for; "": they are."""
        return "" if self._last is None else self._last.reason

    @property
    def tokens_a_verification(self) -> float:
        """The tokens that the last verifications gave a request, for batches like the last; 1.0 if there is none."""
        recent = [] if self._last is None else list(self._last.drafted)[-NUM_TRIALS:]
        return fmean(tokens for _, tokens in recent) if recent else 1.0

    def drafts(self, num_reqs: int) -> bool:
        """Return whether a step of `num_reqs` requests that decode should verify drafts."""
        self._last = one = self._by_size.setdefault(num_reqs.bit_length(), _Measured())
        does_draft = one.is_stopped is (one.steps_left <= 0)
        if one.is_stopped and not does_draft:
            self.num_stopped_steps += 1
        return does_draft

    def record(self, num_reqs: int, *, seconds: float, num_tokens: int, num_drafts: int) -> None:
        """Take the measure of a step in which requests decoded, `num_drafts` drafts of theirs were verified, and they
        got `num_tokens` tokens."""
        one = self._by_size.setdefault(num_reqs.bit_length(), _Measured())
        if num_drafts:
            one.drafted.append((seconds, num_tokens / num_reqs))
        else:
            one.plain.append(seconds)
        if one.steps_left > 0:
            one.steps_left -= bool(num_drafts) is not one.is_stopped
            return
        one.num_tried += bool(num_drafts) is one.is_stopped
        if one.num_tried >= (NUM_TRIALS if one.is_stopped else NUM_PROBES):
            self._judge(one)

    def _judge(self, one: _Measured) -> None:
        """Compare the tokens a second of both kinds of steps, and decide which are run from now on."""
        was_stopped, one.num_tried = one.is_stopped, 0
        recent = list(one.drafted)[-NUM_TRIALS:]
        if recent and one.plain:
            seconds, tokens = median(each for each, _ in recent), fmean(each for _, each in recent)
            plain = median(one.plain)
            one.is_stopped = seconds > tokens * plain * MARGIN
            one.reason = (
                f"a verification gives {tokens:.2f} tokens a request and takes {seconds * 1e3:.2f} ms, a step without "
                f"drafts {plain * 1e3:.2f} ms"
                if one.is_stopped
                else ""
            )
        one.distance = min(one.distance * 2, LONGEST) if one.is_stopped is was_stopped else FIRST_PROBE
        one.steps_left = one.distance
        if one.is_stopped:
            one.drafted.clear()
