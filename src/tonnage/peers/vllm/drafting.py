"""Which kind of draft is loaded beside the target."""

from __future__ import annotations

from tonnage.peers.launch import Launch

#: Hidden states that a head of EAGLE is given: of the last layer and the token's embedding, or of three layers.
HEADS_READ = {"eagle": 2, "eagle3": 3}


def head_of(launch: Launch) -> str:
    """The draft's method where it is a head, by what was asked or by its config.json; empty where it is none."""
    if launch.draft is None:
        return ""
    asked = str(launch.get("speculative_method") or "").lower()
    if asked in HEADS_READ:
        return asked
    names = launch.draft.raw.get("architectures")
    text = " ".join(map(str, names)).lower() if isinstance(names, list) and not asked else ""
    return next((method for method in ("eagle3", "eagle") if method in text), "")
