"""The host device's cap is hard: in a process of its own, since the limit is the whole process's."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import torch
from tonnage.config import LimitKnobs, Setting
from tonnage.device.process import process_memory
from tonnage.engine import EngineOptions, start
from tonnage.sampling import SamplingParams
from tonnage.units import MiB

limits = LimitKnobs(max_seq_len=Setting(64), max_batch_size=Setting(4), max_num_tokens=Setting(32))
engine = start(EngineOptions(model=sys.argv[1], memory_bytes=320 * MiB, limit_knobs=limits))

def serve():
    engine.submit(engine.request("r", SamplingParams(max_tokens=4, ignore_eos=True), token_ids=[5, 9, 11]))
    return [completion.finish_reason.value for _ in range(20) if engine.has_work for completion in engine.step()]

print("before", *serve())
try:
    torch.ones(400 * MiB, dtype=torch.uint8)
    print("an allocation past the cap went through")
except RuntimeError as error:
    print("refused", "allocate memory" in str(error))
launch = engine._runtime.executor.launch

def greedy_step(*arguments):
    torch.ones(400 * MiB, dtype=torch.uint8)
    return launch(*arguments)

engine._runtime.executor.launch = greedy_step
print("during", *serve())
engine._runtime.executor.launch = launch
print("after", *serve())
blocks = []
try:
    while len(blocks) < 4096:
        blocks.append(b"x" * (256 * 1024 + len(blocks)))
    print("small blocks went through")
except MemoryError:
    print("small blocks refused inside the cap", engine._runtime.site.driver.own_bytes() <= 320 * MiB)
del blocks
print("at last", *serve())
engine.close()
print("lifted", torch.ones(400 * MiB, dtype=torch.uint8).numel() == 400 * MiB)
"""


def test_an_allocation_past_the_cap_fails_its_step_and_nothing_else(tiny_llama):
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tiny_llama)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "before length",
        "refused True",
        "during error",
        "after length",
        "small blocks refused inside the cap True",
        "at last length",
        "lifted True",
    ]


TWO = """
import resource
from tonnage.device.fence import lift_fence, raise_fence
from tonnage.units import MiB

limit = lambda: resource.getrlimit(resource.RLIMIT_DATA)[0]
before = limit()
wide = raise_fence(4096 * MiB, least_bytes=0)
narrow = raise_fence(1024 * MiB, least_bytes=0)
both = limit()
lift_fence(wide)
print("narrow stands", limit() == both)
lift_fence(wide)
lift_fence(narrow)
print("as before", limit() == before)
"""


def test_fences_of_two_engines_may_be_lifted_in_any_order():
    done = subprocess.run([sys.executable, "-c", TWO], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["narrow stands True", "as before True"]


SECOND = """
import sys
from tonnage import LLM
from tonnage.errors import UserError

options = {"memory": "320MiB", "max_seq_len": 64, "max_batch_size": 4, "max_num_tokens": 32}
first = LLM(sys.argv[1], **options)
try:
    LLM(sys.argv[1], **options)
except UserError as error:
    print(error)
print(first.generate("a")[0].samples[0].finish_reason)
first.close()
with LLM(sys.argv[1], **options) as second:
    print(second.generate("a")[0].samples[0].finish_reason)
"""


def test_a_second_engine_beside_one_with_a_hard_cap_is_refused_by_name(tiny_llama):
    done = subprocess.run([sys.executable, "-c", SECOND, str(tiny_llama)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told, first, second = done.stdout.splitlines()
    assert "Another engine in this process" in told
    assert "fence=False" in told
    assert {first, second} <= {"length", "stop"}
