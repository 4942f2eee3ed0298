"""What vLLM takes where a setting is left out, by release and card."""

from __future__ import annotations

from fractions import Fraction

from tonnage.hardware import Card
from tonnage.peers.launch import Launch
from tonnage.peers.version import Version
from tonnage.peers.vllm import eras
from tonnage.peers.vllm.drafting import head_of
from tonnage.units import GiB

#: (name, value, why)
Default = tuple[str, str, str]

#: Cards of this size and more serve more sequences and larger steps, but for one kind.
LARGE_CARD_BYTES = 70 * GiB
#: The release from which that kind is excepted.
A100_EXCEPTED = (0, 9)
#: In the first core a longer text than this is computed in chunks, unless the model sees pictures.
CHUNKED_ABOVE_TOKENS = 32_768


def core(launch: Launch) -> str:
    """V1 from 0.8 on; cards before compute capability 8.0 stayed with the first core while there was one, and so did
    drafts by a whole model while it had them."""
    version = launch.version
    if not eras.is_from(version, eras.V1_DEFAULT):
        return "V0"
    is_whole = launch.draft is not None and not head_of(launch)
    if is_whole and not eras.is_from(version, eras.DRAFT_MODELS_GONE):
        return "V0"
    is_old_card = launch.card.kind == "cuda" and 0 < launch.card.sm < 80
    return "V0" if is_old_card and not eras.is_from(version, eras.ONLY_V1) else "V1"


def utilisation(version: Version) -> tuple[Fraction, str]:
    """The share of the card's total (vllm#38284)."""
    if eras.is_from(version, eras.UTILISATION_092):
        return Fraction(92, 100), "of this release; 0.90 before 0.21"
    return Fraction(90, 100), "of this release; 0.92 from 0.21 on"


def is_large(card: Card, version: Version) -> bool:
    """Whether the card gets the larger defaults."""
    is_excepted = "a100" in card.name.lower() and eras.is_from(version, A100_EXCEPTED)
    return card.total_bytes >= LARGE_CARD_BYTES and not is_excepted


def batched_tokens(launch: Launch, *, core: str, max_model_len: int, chunked: bool | None) -> tuple[int, str]:
    """Tokens of one step of the server (the offline class takes larger steps)."""
    if core == "V0":
        is_chunked = max_model_len > CHUNKED_ABOVE_TOKENS and not launch.config.towers if chunked is None else chunked
        if is_chunked:
            return 2048, "chunks of the first core"
        return max(max_model_len, 5120 if launch.config.towers else 2048), "a whole text at once, in the first core"
    usual = 8192 if is_large(launch.card, launch.version) else 2048
    if chunked is False:
        return max(usual, max_model_len), "a whole text at once: prefills are not chunked"
    return usual, _why(launch)


def max_num_seqs(launch: Launch, *, core: str, num_tokens: int) -> tuple[int, str]:
    """Sequences that run at once, never more than tokens of a step."""
    if core == "V0":
        return 256, "of the first core"
    return min(1024 if is_large(launch.card, launch.version) else 256, num_tokens), _why(launch)


def _why(launch: Launch) -> str:
    if is_large(launch.card, launch.version):
        return "of a server on a card of 70 GiB or more"
    return "of a server on a card below 70 GiB, or an A100"
