"""Settings and workloads as a user would ask for them, in few letters."""

from __future__ import annotations

from tonnage.config import Knobs, LimitKnobs, Setting
from tonnage.planner.workload import Workload


def flags(kind: type, **values: object):
    """``kind`` with every value set by a flag of its name."""
    return kind(**{name: Setting.flag(value, value, f"--{name}") for name, value in values.items()})


def knobs(**values: object) -> Knobs:
    return flags(Knobs, **values)


def limits(**values: object) -> LimitKnobs:
    return flags(LimitKnobs, **values)


def workload(users: int, prompt: int, output: int = 0) -> Workload:
    return Workload(num_users=users, prompt_tokens=prompt, output_tokens=output)
