"""Measuring an engine under named workloads, and soaking it under a random mix that an independent oracle judges."""
