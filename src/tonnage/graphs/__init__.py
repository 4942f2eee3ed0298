"""Captured decode steps: which batch sizes get a graph, what a graph is known by, and what replays it.

Choosing sizes (``histogram``, ``load_files``, ``traffic``, ``step_times``, ``optimise``, ``guard``, ``price``) and
agreeing on a graph (``keys``) are plain arithmetic without torch or numpy, so that ``tonnage buckets`` starts at once.
Lists by name and the knob that takes them are ``planner.buckets`` and ``planner.graphs``. Nothing is imported here: a
part is imported by its own name.
"""
