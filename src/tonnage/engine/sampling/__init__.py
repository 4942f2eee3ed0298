"""From logits to tokens: parameters by slot (``table``), counter random numbers (``random``), the device's part."""

from tonnage.engine.sampling.rows import SamplingRows
from tonnage.engine.sampling.sampler import Sampled, Sampler
from tonnage.engine.sampling.table import SamplingTable

__all__ = ["Sampled", "Sampler", "SamplingRows", "SamplingTable"]
