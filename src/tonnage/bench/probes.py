"""The same greedy requests again and again: run alone first, then in the middle of everything, and when it is over."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import TYPE_CHECKING

from tonnage.bench.moves import Ask
from tonnage.caching import CacheParams
from tonnage.sampling import SamplingParams

if TYPE_CHECKING:
    from tonnage.engine import Completion

#: In float32 texts are equal up to the first position where the two best log-probabilities are closer than this.
GAP = 1e-3
NUM_PROBES, MAX_OUTPUT_TOKENS = 6, 64
PHASE = "probes"


@dataclass(slots=True)
class _Reference:
    """What a probe was answered alone, and the gap between the two best at each position; inf: only one is known."""

    tokens: tuple[int, ...]
    gaps: list[float]

    @property
    def num_sure(self) -> int:
        """Tokens before the first position that rounding may decide."""
        return next((i for i, gap in enumerate(self.gaps) if gap < GAP), len(self.gaps))


@dataclass(slots=True, kw_only=True)
class Compared:
    """Texts of probes beside what the same probes were answered alone.

    num_same, num_tokens   tokens up to the first that differs, and all of them
    widest_gap             between the two best alone, where a text went another way; None: none did, or nobody knows
    """

    num_texts: int = 0
    num_whole: int = 0
    num_same: int = 0
    num_tokens: int = 0
    widest_gap: float | None = None

    @property
    def same_share(self) -> float | None:
        return self.num_same / self.num_tokens if self.num_tokens else None


class Probes:
    """``asks`` gives all of them once more, under new names; ``take`` what came. The first answer to each is what later
    ones are compared with, under ``moment``. ``tell(rule, text)``: only where the engine is ``is_exact``, which is to
    say that rounding moves log-probabilities by less than ``GAP``; elsewhere the figures speak.
    """

    def __init__(
        self,
        *,
        seed: int,
        vocab_size: int,
        max_seq_len: int,
        block_tokens: int,
        is_exact: bool,
        tell: Callable[[str, str], None],
    ) -> None:
        rng = random.Random(seed ^ 0x960BE)
        self.is_exact, self._tell = is_exact, tell
        self.moment = "alone"
        self.compared: dict[str, Compared] = {}
        self._references: dict[int, _Reference] = {}
        self._num_rounds = 0
        num_output = min(MAX_OUTPUT_TOKENS, max(1, max_seq_len // 4))
        most = max_seq_len - num_output
        lengths = (1, block_tokens, block_tokens + 1, max_seq_len // 8, max_seq_len // 2, most)
        self._prompts = [rng.choices(range(vocab_size), k=max(1, min(most, length))) for length in lengths]
        self._num_output, self._num_top = num_output, min(2, vocab_size)

    def asks(self) -> list[Ask]:
        """Every second one reads nothing from the cache, and so is computed whole."""
        self._num_rounds += 1
        return [
            Ask(
                id=f"{PHASE}-{self._num_rounds}.{number}",
                token_ids=list(prompt),
                params=SamplingParams(
                    max_tokens=self._num_output, ignore_eos=True, logprobs=self._num_top, seed=number, priority=5,
                    cache=CacheParams(reuse=number % 2 == 0),
                ),
                phase=PHASE,
                probe=number,
            )
            for number, prompt in enumerate(self._prompts)
        ]  # fmt: skip

    def take(self, ask: Ask, completion: Completion) -> None:
        """One that failed or was taken back is the witness's."""
        if ask.probe is None or completion.finish_reason not in ("length", "stop"):
            return
        reference = self._references.get(ask.probe)
        if reference is None:
            gaps = _gaps(completion)
            self._references[ask.probe] = _Reference(completion.token_ids, gaps)
            return
        self._compare(ask, reference, completion.token_ids)

    def _compare(self, ask: Ask, reference: _Reference, tokens: Sequence[int]) -> None:
        same = next((i for i, (a, b) in enumerate(zip(tokens, reference.tokens, strict=False)) if a != b), len(tokens))
        found = self.compared.setdefault(self.moment, Compared())
        found.num_texts += 1
        found.num_same += same
        found.num_tokens += len(reference.tokens)
        if same == len(reference.tokens) == len(tokens):
            found.num_whole += 1
            return
        gap = reference.gaps[same] if same < len(reference.gaps) else inf
        if isfinite(gap):
            found.widest_gap = max(gap, found.widest_gap or 0.0)
        if self.is_exact and same < reference.num_sure:
            self._tell("probes", f"{ask.id} differs from token {same} on, where the two best lie {gap:.2g} apart")


def _gaps(completion: Completion) -> list[float]:
    tops = completion.top_logprobs or [()] * len(completion.token_ids)
    return [top[0][1] - top[1][1] if len(top) > 1 else inf for top in tops]
