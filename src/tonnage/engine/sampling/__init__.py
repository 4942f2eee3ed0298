"""From logits to tokens: parameters by slot (``table``), counter random numbers (``random``), the device's part."""

from tonnage.engine.sampling.edit import count
from tonnage.engine.sampling.rows import SamplingRows
from tonnage.engine.sampling.sampler import Sampler
from tonnage.engine.sampling.table import SamplingTable
from tonnage.engine.sampling.told import Drawn, PromptLogprobs, Sampled

__all__ = ["Drawn", "PromptLogprobs", "Sampled", "Sampler", "SamplingRows", "SamplingTable", "count"]
