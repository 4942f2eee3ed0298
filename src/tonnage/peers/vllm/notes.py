"""What a reader should know beside the numbers: where the release, the card or the model leaves something open."""

from __future__ import annotations

from collections.abc import Iterator

from tonnage.peers.vllm import eras
from tonnage.peers.vllm.adapted import adapts_vocabulary
from tonnage.peers.vllm.budget import Budget
from tonnage.peers.vllm.drafting import head_of
from tonnage.peers.vllm.kept import kept_layers
from tonnage.peers.vllm.pages import Pages
from tonnage.peers.vllm.setup import Setup, switch
from tonnage.peers.vllm.sharing import token_ranks
from tonnage.terms import Source

#: Releases at which a figure jumps, with what does.
_TURNS = (
    (eras.V1_DEFAULT, "the second engine core became the default"),
    (eras.LEAN_SAMPLER, "the sampler's dry run shrank to a third"),
    (
        eras.GRAPHS_DEDUCTED,
        "graphs are deducted before the pool, the default utilisation went from 0.90 to 0.92, and the log's tokens "
        "mean another thing",
    ),
)
#: Cards that share their memory with the host.
_UNIFIED = ("gb10", "jetson", "orin", "thor", "dgxspark")


def notes_of(setup: Setup, budget: Budget, pages: Pages | None) -> tuple[str, ...]:
    return tuple(_notes(setup, budget, pages))


def _notes(setup: Setup, budget: Budget, pages: Pages | None) -> Iterator[str]:
    launch = setup.launch
    for since, what in _TURNS:
        if eras.is_split(launch.version, since):
            release = ".".join(map(str, since))
            yield f"{launch.version} can lie on either side of {release}, where {what}; the newer rule is taken"
    if any(launch.card.name.lower().replace(" ", "").startswith(name) for name in _UNIFIED):
        yield "memory is shared with the host: its page cache counts as used, and boots differ by half a GiB and more"
    positions = launch.config.max_position_embeddings
    if setup.max_model_len > positions:
        yield (
            f"max_model_len {setup.max_model_len:,} is above the {positions:,} positions of config.json: vLLM refuses "
            "it, unless --hf-overrides scale them or VLLM_ALLOW_LONG_MAX_MODEL_LEN is 1"
        )
    if pages is None and kept_layers(setup) is None:
        yield "the pages of a compressed cache are not known here: the pool is told, and no tokens"
    if pages is not None and pages.padding_layers:
        yield f"groups are filled up with {pages.padding_layers} layers that do not exist"
    if launch.config.towers and launch.weights.source not in (Source.MEASURED, Source.COUNTED):
        yield "the encoder's dry run is not modelled: many or large pictures can make it the peak"
    if budget.total.low != budget.total.high:
        yield (
            "the card's total is not the same on every machine: give the driver's own as --memory beside --device for "
            "a narrower answer"
        )
    yield from _adapter_notes(setup)
    yield from _draft_notes(setup, pages)
    if pages is not None and token_ranks(setup) > 1:
        yield "what ranks exchange to divide tokens among them (decode context parallelism) is not in these figures"


def _adapter_notes(setup: Setup) -> Iterator[str]:
    launch = setup.launch
    if not switch(launch, "enable_lora"):
        return
    if adapts_vocabulary(setup) is None:
        yield (
            f"whether the vocabulary of {launch.config.model_type} is adapted too is not known: the interval of the "
            "adapters has both"
        )
    if launch.get("lora_target_modules"):
        yield "lora_target_modules is not followed: the adapters are counted for every matrix that can have one"
    if not setup.is_eager and eras.is_from(launch.version, eras.GRAPHS_WITH_ADAPTERS):
        yield "graphs are captured with and without adapters, and counted once"


def _draft_notes(setup: Setup, pages: Pages | None) -> Iterator[str]:
    launch = setup.launch
    if launch.draft is None:
        if setup.num_drafts and not launch.config.mtp_layers:
            yield "a draft model's own weights and cache are not in these figures"
        return
    yield f"the dry run of {launch.draft.name} and its graphs are not in these figures"
    if head_of(launch) and not setup.is_v1:
        yield "what a head shares with its target in the first core is not known: it is counted whole"
    if pages is not None and not pages.is_uniform:
        yield "pages of several kinds beside a draft's were checked against no log"
    if token_ranks(setup) > 1:
        yield "the draft's tokens are taken to be divided as the target's; from 0.31 on a draft may keep them whole"
