"""What one more graph costs a load that memory binds, as a share of its throughput (spec/runtime.md 6.3, item 4).

A graph of ``m`` bytes takes ``m / k`` tokens from the cache. With ``L`` tokens set aside for each request that is
``m / (k L)`` of a seat, and of ``N`` seats in use so large a share is lost as the fixed part of a step is of it all:

    share = alpha / t(N)  *  m / (k L N)

Where memory does not bind, a graph costs start-up time alone, and its price is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from tonnage.graphs.step_times import StepTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Everything in bytes and tokens; ``num_running`` is the batch that memory allows on an ordinary day.

    graph_bytes      of one size: executable and descriptors of all its variants; the pool of the largest is shared
    kv_token_bytes   of one token in the cache
    request_tokens   set aside for one request: prompt and output
    """

    graph_bytes: int
    kv_token_bytes: int
    request_tokens: int
    num_running: int

    def __post_init__(self) -> None:
        assert self.graph_bytes >= 0
        assert min(self.kv_token_bytes, self.request_tokens, self.num_running) >= 1

    @property
    def kv_tokens(self) -> Fraction:
        """Tokens of cache that one graph takes the place of."""
        return Fraction(self.graph_bytes, self.kv_token_bytes)

    def share(self, times: StepTimes) -> Fraction:
        """Throughput lost to one graph, as a share of it; to be set against the share of step time that it saves."""
        seats = self.kv_tokens / self.request_tokens / self.num_running
        return times.fixed_share(self.num_running) * seats
