"""The coefficients of vLLM's rules from logged starts: `python benchmarks/peer_fit.py [--write]`.

Fitted on logged terms alone (activation peak, non-torch, context, graphs), never on a pool. Robust and deterministic:
a median of what each record says by itself, or the median of the slopes between pairs. ``fit(rows)`` is also what the
evaluation calls with a source left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import combinations
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "unit"))

import peer_rows  # noqa: E402

from tonnage.costs.ranks import rank_shape  # noqa: E402
from tonnage.peers.vllm import eras, nontorch, peak  # noqa: E402
from tonnage.peers.vllm.facts import FILE, Fact  # noqa: E402
from tonnage.peers.vllm.setup import Setup, resolve  # noqa: E402
from tonnage.units import GiB  # noqa: E402

#: Reasons of tests/data/shapes/eligible.json for which a record's terms are not those of its flags.
NOT_OF_THE_FLAGS = (
    "adapters are loaded whose sizes are not told",
    "memory is shared with the host, whose page cache counts as used",
    "the utilisation is told with too few digits",
    "the release is not told",
)
#: What the records say of a log whose lines are not of one rank: in the first core only the first rank samples.
OF_TWO_RANKS = "GiB line and token count come from different ranks"
#: What other starts logged whose records are not in the repository, GiB, less what one card takes there. Collectives:
#: of vLLM's first core on A100 with 4 and with 8 ranks and of a build on H100 with 2 (vllm#10511); of 0.11 on H100 with
#: 2; of SGLang's first ones on H200 with 8. Stages: vLLM 0.19 on H100 without tensor parallelism.
TABLED = {
    "collectives linked early": (0.33, 1.79, 2.00),
    "collectives linked first": (0.42,),
    "collectives linked": (1.80, 2.00),
    "non-torch stages": (0.07,),
}
#: Where no record is left: arithmetic on what the code allocates, or a round number. GiB, or bytes for "sampler lean".
ASSUMED = {
    "sampler lean": (14, 12, 18),  # logits of 16 bits, in float32, probabilities and noise in float32
    "sampler": (38, 30, 46),
    "peak base": (0.0, -0.1, 0.4),
    "peak base early": (0.0, 0.0, 0.2),
    "encoder outputs": (0.0, 0.0, 0.5),
    "context one": (0.5, 0.2, 0.8),
    "context several": (1.5, 0.5, 2.5),
    "graphs base": (0.4, 0.0, 1.0),
    "graphs per layer": (15 / 1024, 5 / 1024, 30 / 1024),
    "graph estimate base": (0.4, 0.0, 1.5),
    "graph estimate per layer": (15 / 1024, 5 / 1024, 30 / 1024),
    "graphs V0": (0.35, 0.1, 0.9),
    "collectives pcie": (0.1, 0.0, 0.5),
}
#: Coefficients that stand in for one without records, the nearest first.
BORROWED = {
    "non-torch V1": ("non-torch late", "non-torch V0"),
    "non-torch late": ("non-torch V1", "non-torch V0"),
    "non-torch rocm": ("non-torch V0",),
    "non-torch V0": ("non-torch V1",),
}
#: What earlier releases would say in the place of ``TABLED`` and ``ASSUMED``: collectives as 0.11 logged them, and the
#: sampler of before 0.17. No start of the package is predicted by these; the evaluation tells what each choice carries.
EARLIER: dict[str, dict[str, tuple[float, ...]]] = {
    "collectives linked": {"collectives linked": TABLED["collectives linked first"]},
    "sampler lean": {"sampler lean": ASSUMED["sampler"]},
}
#: How far two digits of a log are off; what a lone record is trusted to: a share of it, and at least so many GiB.
_DIGITS, _LONE, _LONE_GIB = 0.01, 0.25, 0.2
_NOTHING: Mapping[str, tuple[float, ...]] = {}


@dataclass(frozen=True, slots=True)
class Row:
    """One record with its launch resolved; figures in GiB."""

    id: str
    logged: dict[str, float]
    setup: Setup

    @property
    def has_encoder(self) -> bool:
        return bool(self.setup.launch.config.towers)

    @property
    def is_lean(self) -> bool:
        return eras.is_from(self.setup.launch.version, eras.LEAN_SAMPLER)

    @property
    def num_layers(self) -> int:
        return len(rank_shape(self.setup.launch.config, self.setup.launch.rank).layers)

    @property
    def peak_gib(self) -> float | None:
        if "peak_torch_gib" in self.logged:
            return self.logged["peak_torch_gib"] - self.logged["weights_gib"]
        return self.logged.get("activation_peak_gib")


def rows(records: Iterable[dict]) -> list[Row]:
    """Those whose terms follow from their flags, and whose shape is known with its encoder."""
    left_out = peer_rows.eligible()["pool_left_out"]
    found = []
    for record in records:
        is_mixed = any(check.get("why") == OF_TWO_RANKS for check in record["check"])
        is_build = ".dev" in record["engine_version"]  # of a pull request, whose accounting no release need have had
        if left_out.get(record["id"]) in NOT_OF_THE_FLAGS or is_mixed or is_build or not peer_rows.is_known(record):
            continue
        found.append(_row(record["id"]))
    return found


@cache
def _row(name: str) -> Row:
    record = peer_rows.records()[name]
    return Row(name, record["logged"], resolve(peer_rows.launch_of(record)))


@dataclass(frozen=True, slots=True)
class Sample:
    id: str
    value: float


def _fact(
    samples: Sequence[Sample], *, unit: str, scale: float = GiB, digits: float = _DIGITS, least: float | None = None
) -> Fact:
    """The median; as far as the records reach, and further by a share that shrinks with their number.

    ``least``: nothing below it can be, whatever two digits of a log say.
    """
    values = [sample.value for sample in samples]
    best, low, high = median(values), min(values), max(values)
    margin = max(digits, abs(best) * 0.02, (high - low) / (2 * len(values)))
    if len(values) == 1:
        margin = max(margin, abs(best) * _LONE, _LONE_GIB)
    return Fact(
        best=_exact(best, scale),
        low=_exact(low - margin if least is None else max(least, low - margin), scale),
        high=_exact(high + margin, scale),
        unit=unit,
        records=tuple(sample.id for sample in samples),
    )


def _exact(value: float, scale: float) -> Fraction:
    """Whole bytes where the unit is bytes, else two decimals."""
    return Fraction(round(value * scale)) if scale > 1 else Fraction(round(value * 100), 100)


def _slope(points: Sequence[tuple[float, float]]) -> float | None:
    """The median slope between pairs whose places differ by a fifth or more; None where there are fewer than three."""
    slopes = [
        (y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(points, 2) if abs(x2 - x1) > 0.2 * max(x1, x2)
    ]
    return median(slopes) if len(slopes) >= 3 else None


def fit(records: Iterable[dict], *, instead: Mapping[str, tuple[float, ...]] = _NOTHING) -> dict[str, Fact]:
    """Every coefficient that the rules ask for. ``instead``: other figures than ``TABLED`` and ``ASSUMED``."""
    found = rows(records)
    facts = {**_early_peaks(found), **_lean_peaks(found), **_non_torch(found, instead), **_contexts(found)}
    facts |= _graphs(found)
    for name, others in BORROWED.items():
        if name not in facts:
            other = next((other for other in others if other in facts), None)
            if other is not None:
                facts[name] = _borrowed(facts[other], other)
    for name, assumed in ASSUMED.items():
        best, low, high = instead.get(name, assumed)
        scale = 1 if name.startswith("sampler") else GiB
        if name not in facts:
            facts[name] = Fact(best=_exact(best, scale), low=_exact(low, scale), high=_exact(high, scale),
                               unit="bytes", records=(), borrowed_from="assumed")  # fmt: skip
    return dict(sorted(facts.items()))


def _borrowed(fact: Fact, name: str) -> Fact:
    """Another era's, trusted to half of it and half a GiB."""
    extra = fact.best / 2 + GiB // 2
    return Fact(best=fact.best, low=max(Fraction(0), fact.low - extra), high=fact.high + extra, unit=fact.unit,
                records=fact.records, borrowed_from=name)  # fmt: skip


def _early_peaks(found: Sequence[Row]) -> dict[str, Fact]:
    """Until 0.16: bytes for each sequence and entry of the vocabulary; what lies beside a forward that wins."""
    facts: dict[str, Fact] = {}
    plain = [row for row in found if not row.is_lean and row.peak_gib is not None and not row.has_encoder]
    wins = {row.id: _forward_wins(row, 38) for row in plain}
    forwards = [Sample(row.id, row.peak_gib - _gib(peak.peak_of(row.setup).forward_bytes))
                for row in plain if wins[row.id]]  # fmt: skip
    if forwards:
        facts["peak base early"] = _fact(forwards, unit="bytes")
    samples = [Sample(row.id, row.peak_gib * GiB / peak.peak_of(row.setup).sampler_entries)
               for row in plain if not wins[row.id]]  # fmt: skip
    if samples:
        facts["sampler"] = _fact(samples, unit="bytes a sequence and entry", scale=1, digits=0.3)
    return facts


def _forward_wins(row: Row, each: float) -> bool:
    run = peak.peak_of(row.setup)
    return run.forward_bytes > each * run.sampler_entries + run.beside_sampler_bytes


def _lean_peaks(found: Sequence[Row]) -> dict[str, Fact]:
    """From 0.17 on: a slope over sequences x vocabulary, and what is left beside it; with an encoder, its outputs."""
    facts: dict[str, Fact] = {}
    lean = [row for row in found if row.is_lean and row.peak_gib is not None]
    plain = [row for row in lean if not row.has_encoder]
    samplers = [row for row in plain if not _forward_wins(row, 14)]
    points = [(_gib(peak.peak_of(row.setup).sampler_entries),
               row.peak_gib - _gib(peak.peak_of(row.setup).beside_sampler_bytes)) for row in samplers]  # fmt: skip
    slope = _slope(points)
    if slope is None and points:
        slope = median(y / x for x, y in points)
    if slope is None:
        return facts
    ids = tuple(row.id for row in samplers)
    width = 0.01 if len(set(points)) > 2 else 0.1
    facts["sampler lean"] = Fact(
        best=_exact(slope, 1), low=_exact(slope * (1 - width), 1), high=_exact(slope * (1 + width), 1),
        unit="bytes a sequence and entry", records=ids,
    )  # fmt: skip
    facts["peak base"] = _fact([Sample(row.id, _beside(row, slope)) for row in plain], unit="bytes", digits=0.05)
    base = float(facts["peak base"].best) / GiB
    seeing = [Sample(row.id, _beside(row, slope) - base) for row in lean if row.has_encoder]
    if seeing:
        facts["encoder outputs"] = _fact(seeing, unit="bytes", digits=0.05)
    return facts


def _beside(row: Row, slope: float) -> float:
    run = peak.peak_of(row.setup)
    sampler = _gib(run.sampler_entries) * slope + _gib(run.beside_sampler_bytes)
    return row.peak_gib - max(sampler, _gib(run.forward_bytes))


def _non_torch(found: Sequence[Row], instead: Mapping[str, tuple[float, ...]]) -> dict[str, Fact]:
    """One card by itself, by release; what is more on several, by the links between them."""
    counted = [row for row in found if "non_torch_gib" in row.logged
               and eras.is_from(row.setup.launch.version, eras.NON_TORCH_COUNTED)]  # fmt: skip
    alone: dict[str, list[Sample]] = {}
    for row in counted:
        if nontorch.collectives_fact(row.setup) is None:
            sample = Sample(row.id, row.logged["non_torch_gib"])
            alone.setdefault(nontorch.one_card_fact(row.setup), []).append(sample)
    facts = {name: _fact(samples, unit="bytes", digits=0.03, least=0.0) for name, samples in alone.items()}
    between: dict[str, list[Sample]] = {
        name: [Sample("tabled", value) for value in instead.get(name, values)] for name, values in TABLED.items()
    }
    for row in counted:
        name, own = nontorch.collectives_fact(row.setup), nontorch.one_card_fact(row.setup)
        own = next((each for each in (own, *BORROWED.get(own, ())) if each in facts), own)
        if name is not None and own in facts:
            value = row.logged["non_torch_gib"] - float(facts[own].best) / GiB
            between.setdefault(name, []).append(Sample(row.id, value))
    for name, samples in between.items():
        facts[name] = _without_tabled(_fact(samples, unit="bytes", digits=0.03, least=0.0))
    return facts


def _without_tabled(fact: Fact) -> Fact:
    records = tuple(name for name in fact.records if name != "tabled")
    return Fact(best=fact.best, low=fact.low, high=fact.high, unit=fact.unit, records=records,
                borrowed_from="a table of other records" if records != fact.records else "")  # fmt: skip


def _contexts(found: Sequence[Row]) -> dict[str, Fact]:
    samples: dict[str, list[Sample]] = {}
    for row in found:
        if "cuda_context_at_init_gib" in row.logged:
            name = nontorch.context_fact(row.setup)
            samples.setdefault(name, []).append(Sample(row.id, row.logged["cuda_context_at_init_gib"]))
    return {name: _fact(each, unit="bytes", digits=0.1) for name, each in samples.items()}


def _graphs(found: Sequence[Row]) -> dict[str, Fact]:
    """Of the first core: a median. Later: a slope over the layers of the rank, and what is left; estimates alike."""
    facts: dict[str, Fact] = {}
    first = [Sample(row.id, row.logged["cuda_graph_gib"]) for row in found
             if not row.setup.is_v1 and "cuda_graph_gib" in row.logged]  # fmt: skip
    if first:
        facts["graphs V0"] = _fact(first, unit="bytes", digits=0.1)
    for kind, key in (("graphs", "cuda_graph_gib"), ("graph estimate", "cuda_graph_estimated_gib")):
        later = [row for row in found if row.is_lean and row.setup.is_v1 and key in row.logged
                 and row.setup.max_num_seqs >= 256]  # fmt: skip
        facts.update(_over_layers(kind, [(row.id, row.num_layers, row.logged[key]) for row in later]))
    return facts


def _over_layers(kind: str, points: Sequence[tuple[str, int, float]]) -> dict[str, Fact]:
    slope = _slope([(layers, value) for _, layers, value in points])
    if slope is None:
        return {}
    samples = [Sample(name, value - slope * layers) for name, layers, value in points]
    ids = tuple(name for name, *_ in points)
    each = _exact(slope, GiB)
    return {
        f"{kind} base": _fact(samples, unit="bytes", digits=0.05),
        f"{kind} per layer": Fact(best=each, low=each * 3 // 4, high=each * 5 // 4, unit="bytes a layer", records=ids),
    }


def _gib(num_bytes: int) -> float:
    return num_bytes / GiB


def text_of(facts: dict[str, Fact]) -> str:
    """The file: decimals as text, records in one line."""
    found = {
        name: {
            "best": _decimal(fact.best), "low": _decimal(fact.low), "high": _decimal(fact.high), "unit": fact.unit,
            "num_records": len(fact.records), "records": " ".join(fact.records),
            **({"borrowed_from": fact.borrowed_from} if fact.borrowed_from else {}),
        }
        for name, fact in facts.items()
    }  # fmt: skip
    about = "Coefficients of vLLM's rules, fitted on logged starts by benchmarks/peer_fit.py: do not edit."
    return json.dumps({"about": about, "facts": found}, indent=1) + "\n"


def _decimal(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.2f}"


def main(arguments: Sequence[str], *, show: Callable[[str], None] = print) -> None:
    text = text_of(fit(peer_rows.records().values()))
    if "--write" in arguments:
        FILE.write_text(text, encoding="utf-8")
    show(text)


if __name__ == "__main__":
    main(sys.argv[1:])
