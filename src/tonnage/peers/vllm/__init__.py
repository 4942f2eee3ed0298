"""vLLM's start by its own rules: what is deducted before the pool is sized, and what the pool is cut into.

``start.predict`` is the entry. ``facts.json`` holds the coefficients that were fitted on logged starts, each with its
interval and the records it is from; everything else is arithmetic that the engine does itself.
"""
