"""What llama.cpp does at start-up, as rules with their records and sources. Most are read, not logged."""

from __future__ import annotations

from tonnage.peers.start import Rule

#: common/fit.cpp as it was in the autumn of 2026.
READ = "source of common/fit.cpp, 2026; no start-up log"

OUTSIDE = Rule(
    name="context",
    says="The driver's context is there before free memory is read: that of a process without torch; no log tells it.",
    source="no start-up log",
)
WEIGHTS = Rule(
    name="weights",
    says="The file's tensors without the input embeddings, which stay on the host; where embeddings are tied the "
    "device keeps a copy for the output.",
    source="source of the model loader; no start-up log",
)
CACHE = Rule(
    name="kv cache",
    says="Every cell of the context is allocated at the start, padded to 256 cells; layers with a window keep that "
    "window for each sequence and a ubatch.",
    records=("lmstudio-1862",),
    source="source of 2026",
)
STATES = Rule(
    name="recurrent states",
    says="One state for each parallel sequence, convolution and matrix in float32 both.",
    records=("lmstudio-1862",),
    source="source of 2026",
)
COMPUTE = Rule(
    name="compute buffer",
    says="Sized exactly from the graph of the worst ubatch: here tokens of a ubatch x (vocabulary + width) x 4 bytes, "
    "and without flash attention x heads x context x 4 as well.",
    source="SciSharp/LLamaSharp#1099 (300.75 MiB, reproduced to the digit)",
)
MARGIN = Rule(
    name="fit margin",
    says="With --fit, on by default since late 2025, projected free memory must keep 1,024 MiB on every device. Only "
    "what was left unset is changed, in this order: the context, by straight interpolation and down to 4,096; then "
    "layers go to the host, of a mixture first its experts.",
    source=READ,
)
GIVES_UP = Rule(
    name="fit gives up",
    says="Where layers for the device were set, --fit changes nothing but an unset context; what does not fit then "
    "fails while it is allocated.",
    source=READ,
)
LEFT = Rule(name="left free", says="The margin, and what whole cells or layers leave over.", source=READ)
