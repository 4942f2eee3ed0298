"""The reference policy: how TensorRT-LLM derives the size of its KV pool, restated as pure functions with names.

    knobs, environment, followed   what can be set, with the reference's defaults and rules
    manager, estimation  which of its two managers runs, and whether anything is probed
    probe, measure       the prompts of the probe, its temporary pool, and the peak that is read
    derive               peak, reserves, fraction, deductions, caps: the order of the derivation
    charges, mla         the reserves by formula; scratch that grows with attended tokens, and its cap
    slopes, windows, states   what a token costs
    tokens, pages, split, host   bytes to tokens to blocks, on every rank and for two caches and three tiers
    plan                 the same derivation over the inputs of any plan

A plan computes with what ``plan`` imports, and what that needs in turn. The other functions state the rest of the
reference's rules for whoever compares engines, each held to worked vectors by the tests; no plan reads them.

Bytes unless a name says tokens or blocks; fractions are exact, and the reference's floats are compared after
flooring. Quirks of the reference are kept and marked, with what ours does instead. ``docs/reference-policy.md`` tells
the order and the differences.
"""
