"""The engine: start-up, scheduler, executor, sampler.

``start(EngineOptions(...))`` gives an ``Engine``, which is stepped; ``LLM`` and ``AsyncLLM`` in ``tonnage`` do that.
"""

from tonnage.engine.core import Engine
from tonnage.engine.options import EngineOptions
from tonnage.engine.request import Completion, Delta, Finish, Progress, Request
from tonnage.engine.startup import start

__all__ = ["Completion", "Delta", "Engine", "EngineOptions", "Finish", "Progress", "Request", "start"]
