"""Activations without a device: the model's forward on fake tensors, for ``tonnage plan --exact``.

``skeleton`` builds the model from config.json alone, ``steps`` runs it, ``trace`` writes down what comes and goes,
``fusion`` says what of it compiled layers keep, ``segments`` what torch's allocator takes for that, ``coefficients``
how far both were from what was measured, and ``probe`` makes stages of a plan of it.
"""

from tonnage.engine.exact.probe import FakeProbe

__all__ = ["FakeProbe"]
