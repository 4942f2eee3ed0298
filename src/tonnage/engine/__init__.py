"""The engine: start-up, scheduler, executor, sampler. ``start(EngineOptions(...))`` gives an ``Engine``."""

from tonnage.engine.core import Engine
from tonnage.engine.options import EngineOptions
from tonnage.engine.request import Completion, Finish, Progress, Request
from tonnage.engine.startup import start

__all__ = ["Completion", "Engine", "EngineOptions", "Finish", "Progress", "Request", "start"]
