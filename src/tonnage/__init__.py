"""Tonnage: one memory budget for an LLM inference engine.

The budget is a pure function from what the user allows, what was measured and what was declared to one
partition of the device; the engine is built from that partition; the ledger checks reality against it.
"""

__version__ = "0.1.0"
