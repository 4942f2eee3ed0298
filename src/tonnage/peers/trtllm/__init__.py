"""TensorRT-LLM's start: its engines of before 1.0 here, its PyTorch backend by ``tonnage.budget.reference``.

That derivation needs a plan's claims and predictions, which are made above this room: ``tonnage.planner.trtllm``
feeds it, and ``from_plan`` tells its result in the terms of a start.
"""
