"""Which decode batch sizes get a CUDA graph of their own."""

from __future__ import annotations

from tonnage.config import Setting
from tonnage.errors import InvalidSetting

#: Steps of the list that engines commonly capture: 1, 2, 4, then every eighth up to 256, then every sixteenth.
_SMALL, _EIGHTHS_END = (1, 2, 4), 256
#: A list longer than this is a typing error: each graph costs megabytes and seconds.
MOST_GRAPHS = 1024


def graph_sizes(asked: Setting[str], *, max_batch_size: int, on_host: bool) -> tuple[int, ...]:
    """The sizes, ascending, none above ``max_batch_size``; empty for "none" and where there are no graphs (a host).

    ``asked`` is "none", "default", or numbers between commas. Raises ``InvalidSetting`` for anything else, and for a
    size above ``max_batch_size``: no step could replay it.
    """
    text = "default" if asked.value is None else asked.value.strip().lower()
    if text == "none" or (on_host and not asked.is_set):
        return ()
    if on_host:
        raise InvalidSetting("graphs", asked.value, "a host captures no graphs", remedy="leave graphs out")
    if text == "default":
        return default_sizes(max_batch_size)
    sizes = tuple(sorted({_size(part, asked) for part in text.split(",")}))
    if sizes[-1] > max_batch_size:
        raise InvalidSetting(
            "graphs",
            asked.value,
            f"{sizes[-1]} is above max_batch_size = {max_batch_size}, so no step could replay it",
            remedy=f"leave out sizes above {max_batch_size}, or raise max_batch_size",
        )
    if len(sizes) > MOST_GRAPHS:
        raise InvalidSetting("graphs", f"{len(sizes)} sizes", f"more than {MOST_GRAPHS}", remedy="name fewer sizes")
    return sizes


def default_sizes(max_batch_size: int) -> tuple[int, ...]:
    """The common list up to ``max_batch_size``, which always has a graph itself."""
    eighths = range(8, min(max_batch_size, _EIGHTHS_END) + 1, 8)
    sixteenths = range(_EIGHTHS_END + 16, max_batch_size + 1, 16)
    small = (size for size in _SMALL if size <= max_batch_size)
    return tuple(sorted({*small, *eighths, *sixteenths, max_batch_size}))


def _size(part: str, asked: Setting[str]) -> int:
    part = part.strip()
    if not (part.isascii() and part.isdigit()) or int(part[:10]) == 0:
        raise InvalidSetting(
            "graphs", asked.value, f"{part!r} is not a batch size", remedy="write none, default, or 1,2,4,8"
        )
    return int(part[:10])
