"""What vLLM up to 0.20 charged for a token of a model with windows: more than its layers keep."""

from __future__ import annotations

import re
from fractions import Fraction

from tonnage.layout import KVGroup, KVGroupKind, KVLayout
from tonnage.units import ceil_div

#: The last release whose pool is divided by the padded rate.
LAST_PADDED = (0, 20)


def vllm_padded_bytes_per_token(layout: KVLayout, *, version: str) -> Fraction | None:
    """Bytes of one token in the pool of vLLM ``version``, where windows make it pad; None where it does not.

    All its pages have one size, so layers are dealt to groups of as many layers as the rarer kind has, and the last
    group of each kind is filled up with layers that do not exist. Windows count at full length. With F layers that
    see everything, S with a window, g = min(F, S) and b bytes of a token in one layer:

        rate = b * g * (ceil(F / g) + ceil(S / g))

    None for a release after ``LAST_PADDED``, for a version that is no number, and for a layout without windows, or
    with recurrent states (whose pages are made equal in another way).

    Source: pool and tokens in start-up logs of 0.9 to 0.20, among them 70 layers charged for the 62 of a Gemma 3 27B.
    """
    full, window = (_of_kind(layout, kind) for kind in (KVGroupKind.FULL, KVGroupKind.WINDOW))
    if not window or len(full) + len(window) < len(layout.groups) or not _is_padded(version):
        return None
    numbers = [num for groups in (full, window) if (num := sum(len(group.layers) for group in groups))]
    size = min(numbers)
    first = (full or window)[0]
    of_layer = Fraction(first.block_bytes, first.block_tokens * len(first.layers))
    return of_layer * size * sum(ceil_div(number, size) for number in numbers)


def _of_kind(layout: KVLayout, kind: KVGroupKind) -> list[KVGroup]:
    return [group for group in layout.groups if group.kind == kind]


def _is_padded(version: str) -> bool:
    found = re.match(r"v?(\d+)\.(\d+)", version.strip())
    return found is not None and (int(found[1]), int(found[2])) <= LAST_PADDED
