"""Captured decode steps: which batch sizes get a graph, what a graph is known by, and what replays it.

Choosing sizes (``buckets``, ``histogram``, ``traces``, ``traffic``, ``step_times``, ``optimise``, ``guard``, ``price``)
and agreeing on a graph (``keys``) are plain arithmetic without torch or numpy, so that ``tonnage buckets`` starts at
once. Nothing is imported here: a part is imported by its own name.
"""
