"""What a launch is told: a stable code, how grave it is, what, why, and what to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from tonnage.peers.commands.command import Command
from tonnage.peers.start import Start


class Severity(StrEnum):
    """Gravest first."""

    ERROR = "error"  # it will not start, or not do what was asked
    WARNING = "warning"  # it may fail, or it loses much
    NOTE = "note"


#: Code -> what it is about. A code keeps its meaning; one that is gone is not used again.
CODES: Mapping[str, str] = {
    "TN001": "it will not start",
    "TN002": "it may not start",
    "TN003": "a value that the engine does not read",
    "TN004": "a flag that no release reads",
    "TN005": "a flag that this release does not read",
    "TN006": "a variable without a value",
    "TN007": "the release is not known, or newer than the rules",
    "TN008": "it was not predicted",
    "TN009": "an options file that is not at hand",
    "TN010": "what the number of sequences costs",
    "TN011": "a sequence of full length does not fit",
    "TN012": "fewer users fit than asked for",
    "TN013": "flags that the command does not reach",
    "TN020": "too little is left after start-up",
    "TN021": "engines on one GPU ask for more than all of it",
    "TN022": "other processes hold what it asks for",
    "TN023": "log-probabilities of prompts are not in the budget",
    "TN030": "heads do not divide by the ranks",
    "TN031": "KV heads are held more than once",
    "TN032": "fewer GPUs than ranks",
    "TN033": "more GPUs than ranks",
    "TN034": "too little shared memory",
    "TN035": "latents are held by every rank",
    "TN040": "the cache in eight bits would hold more",
    "TN041": "graphs are switched off",
    "TN042": "layers with windows or states are held in full",
    "TN043": "a draft model beside it is not counted",
    "TN044": "weights are quantised as they are loaded, and into what is not known",
    "TN045": "experts that groups of ranks share are counted whole",
    "TN046": "what the buffers of adapters cost",
    "TN050": "a correction from a log was applied",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing to tell.

    what    one sentence, with the flag and the value
    why     figures of the prediction, and where the rule comes from
    change  flags to write instead, each tried by predicting again; empty where nothing was found that works
    """

    code: str
    severity: Severity
    what: str
    why: str = ""
    change: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Linted:
    """One launch with everything that is to be told about it. ``start`` None: it was not predicted."""

    file: str
    command: Command
    version: str
    card: str | None
    start: Start | None = None
    findings: tuple[Finding, ...] = field(default_factory=tuple)

    @property
    def worst(self) -> Severity | None:
        """The gravest severity, None where nothing was found."""
        order = list(Severity)
        return min((finding.severity for finding in self.findings), key=order.index, default=None)
