"""Memory of the process that torch does not hand out: the context before the budget, and what grows within it."""

from __future__ import annotations

from tonnage.hardware import Card
from tonnage.peers.start import Rule
from tonnage.peers.vllm import eras
from tonnage.peers.vllm.facts import Facts
from tonnage.peers.vllm.peak import peak_of
from tonnage.peers.vllm.setup import Setup
from tonnage.terms import Quantity, Source

#: Cards whose kind is linked by NVLink, where collectives keep large buffers; others talk over PCIe.
LINKED = ("h100", "h200", "h20", "h800", "a100", "a800", "b200", "b300", "gb200", "gb300", "80gb-class", "141gb-class")


def is_linked(card: Card) -> bool:
    name = card.name.lower().replace(" ", "")
    return any(name.startswith(kind) for kind in LINKED) and "nvl" not in name.removeprefix("h100").removeprefix("h200")


def is_rocm(card: Card) -> bool:
    name = card.name.lower()
    return any(name.startswith(kind) for kind in ("amd", "mi1", "mi2", "mi3", "radeon", "instinct"))


def one_card_fact(setup: Setup) -> str:
    """The name of the coefficient of one card by itself: by core and release."""
    if is_rocm(setup.launch.card):
        return "non-torch rocm"
    if not setup.is_v1:
        return "non-torch V0"
    rank = setup.launch.rank
    if rank.pp > 1 and rank.tp == 1:
        return "non-torch stages"
    return "non-torch late" if eras.is_from(setup.launch.version, eras.MORE_NON_TORCH) else "non-torch V1"


def collectives_fact(setup: Setup) -> str | None:
    """The name of what collectives take on top, by the links between the cards; None on one card."""
    if setup.launch.rank.tp == 1:
        return None
    if not is_linked(setup.launch.card):
        return "collectives pcie"
    version = setup.launch.version
    if not eras.is_from(version, eras.COLLECTIVES_FIRST):
        return "collectives linked early"
    return "collectives linked" if eras.is_from(version, eras.LEAN_SAMPLER) else "collectives linked first"


def context_fact(setup: Setup) -> str:
    return "context several" if setup.launch.rank.tp > 1 and is_linked(setup.launch.card) else "context one"


def non_torch(setup: Setup, facts: Facts) -> Quantity:
    """Bytes that the profile finds taken beside torch's; the first context too before the profile knew it apart."""
    name, between = one_card_fact(setup), collectives_fact(setup)
    parts = [facts[name].of(1, ref=name)]
    if between is not None:
        parts.append(facts[between].of(1, ref=between))
    if not eras.is_from(setup.launch.version, eras.NON_TORCH_COUNTED):
        parts += [context(setup, facts), _reserved(setup)]
    return Quantity(
        bytes=sum(part.bytes for part in parts),
        low=sum(part.low for part in parts),
        high=sum(part.high for part in parts),
        source=parts[0].source,
        ref="; ".join(part.ref for part in parts),
    )


def _reserved(setup: Setup) -> Quantity:
    """Before 0.6.4 all that torch had reserved in the dry run was charged, used or not: up to the run's own size again,
    and with several ranks up to a third of the weights (vllm#2031). Counted with nothing, and with that as its end."""
    launch = setup.launch
    most = peak_of(setup).forward_bytes + (launch.weights.bytes // 3 if launch.rank.tp > 1 else 0)
    return Quantity(bytes=0, low=0, high=most, source=Source.ASSUMED, ref="reserved and not used")


def context(setup: Setup, facts: Facts) -> Quantity:
    """Bytes of context, kernels and collectives before the first look, outside the budget."""
    return facts[context_fact(setup)].of(1, ref=context_fact(setup))


def rule(setup: Setup, facts: Facts) -> Rule:
    between = collectives_fact(setup)
    return Rule(
        name="non-torch",
        says="kernels and workspaces that torch does not count, by release; on several cards collectives on top, by "
        "the links between them",
        records=facts[one_card_fact(setup)].records + (facts[between].records if between else ()),
    )


def context_rule(setup: Setup, facts: Facts) -> Rule:
    is_outside = eras.is_from(setup.launch.version, eras.NON_TORCH_COUNTED)
    return Rule(
        name="context",
        says="taken before the first look at free memory"
        + (", so outside the budget" if is_outside else "; here within the budget, with what torch does not count"),
        since=eras.NON_TORCH_COUNTED if is_outside else None,
        records=facts[context_fact(setup)].records,
    )
