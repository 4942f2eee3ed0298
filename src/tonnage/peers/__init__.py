"""Other engines' knobs: what theirs mean in ours, and which of theirs would give about the pool of a plan.

Facts about the engines (names, defaults, denominators of their fractions) are in this room alone, with the versions
they were read from.
"""
