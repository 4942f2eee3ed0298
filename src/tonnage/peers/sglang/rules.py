"""What SGLang does at start-up, as rules with their dates, records and sources."""

from __future__ import annotations

from tonnage.peers.start import Rule

#: Whose code the dated rules were read from; earlier eras from stored copies of earlier releases.
READ = "source of 0.5.23"
#: Seen there, and neither in logs nor in the source of 0.5.9; which release was the first is not known.
AFTER_9 = "source of 0.5.23, not yet in 0.5.9"

OUTSIDE = Rule(
    name="context",
    says="The driver's context and library handles are there before the first look at free memory: 0.71 and 0.73 GiB "
    "on two H100s; a catalogued figure of the card counts before these. Collectives come on top with several ranks: "
    "1.8 to 2.0 GiB with eight, next to nothing with two of one consumer board, 0.16 GiB with stages alone.",
    records=("fs-65830671609", "sg-fs-70920711276", "fs-53944457073"),
    source="start-up logs",
)
WEIGHTS = Rule(
    name="weights",
    says="Weights of the target, and of a draft, are what free memory loses while they load.",
    records=("fs-47444754202", "fs-55068335887", "fs-65830671609"),
    source=READ,
)
STATIC = Rule(
    name="static fraction",
    says="Pools get what is free after loading less (1 - mem_fraction_static) of what was free before it; activations, "
    "graphs and everything else live off that rest, and none of it is measured.",
    records=("fs-9542409931", "fs-52853901169", "sg-dsv4-h20", "fs-65830671609"),
    source=READ,
)
BY_RANKS = Rule(
    name="default fraction",
    says="Left out, mem_fraction_static is 0.88 for one rank, 0.87 from two, 0.85 from four, 0.81 from eight, 0.79 "
    "from sixteen, whatever the card.",
    before=(0, 4, 10),
    records=("fs-9542409931",),
    source="source of 0.4.6",
)
BY_CARD = Rule(
    name="default fraction",
    says="Left out, mem_fraction_static leaves 2.8 GiB and 0.1 a rank below 35 GiB, 9.5 and 0.5 a rank below 90, 12 "
    "and 0.5 a rank below 160, and 32 GiB above.",
    since=(0, 4, 7),
    before=(0, 5, 4),
    records=("fs-47444754202",),
    source="source of 0.5.1; not yet in 0.4.6",
)
BY_CHUNK = Rule(
    name="default fraction",
    says="Left out, mem_fraction_static leaves 512 MiB, 1.5 MiB a token of a chunk, 2 MiB a sequence of the largest "
    "graph and 128 MiB a rank, at least 10 GiB on cards above 60.",
    since=(0, 5, 3),
    before=(0, 5, 23),
    records=("fs-46415979912", "fs-53944457073"),
    source="sgl-project/sglang#10975",
)
BY_GRAPHS = Rule(
    name="default fraction",
    says="Left out, mem_fraction_static leaves 512 MiB, 1.5 MiB a token of a chunk, 2 MiB a sequence of the largest "
    "graph, 8 MiB for each size of prefill graph (1.5 GiB with latent attention) and 128 MiB a rank, at least 10 GiB "
    "on cards above 60.",
    since=(0, 5, 10),
    source=AFTER_9,
)
ENCODER = Rule(
    name="encoder share",
    says="With a vision tower the default fraction is multiplied by 0.95 and by 1 - 0.1 (size / size of a ViT-L - 1), "
    "that factor between 0.8 and 1.05.",
    records=("fs-53944457073",),
    source=READ,
)
MEDIA = Rule(
    name="multimodal reserve",
    says="With a vision tower 100 MB are kept from the pools for a cache of features.",
    since=(0, 5, 10),
    records=("sg-dsv41-spark", "fs-65830671609"),
    source=AFTER_9,
)
STATES = Rule(
    name="state pool",
    says="Recurrent states get mamba_full_memory_ratio / (1 + ratio) of the pools before tokens do, or "
    "max_mamba_cache_size slots; one slot more is allocated than counted.",
    records=("fs-46415979912", "fs-53944457073", "fs-65830671609", "fs-69213517065", "sg-fs-70920711276"),
    source=READ,
)
VERIFY = Rule(
    name="verification states",
    says="With drafts every running sequence, and one more, keeps a matrix for each draft token: (sequences + 1) x "
    "draft tokens x state, and the inputs of its convolutions once.",
    records=("sg-fs-70920711276",),
    source=READ,
)
CELLS = Rule(
    name="token pool",
    says="What is left divides by the bytes of a token: key and value heads of this rank in every layer that keeps "
    "them; a latent is whole on every rank, an indexer adds 132 bytes a layer; drafted layers count like the target's.",
    records=("fs-47444754202", "fs-67160078054", "fs-62173106413", "sg-fs-66428217379"),
    source=READ,
)
WINDOWS = Rule(
    name="window pool",
    says="Layers with a window get swa_full_tokens_ratio tokens for each token of the others (0.8; 0.15 for Gemma 4, "
    "0.1 for DeepSeek V4), whatever their window; in models whose two pools SGLang does not know they count in full.",
    source=READ,
)
COMPRESSED = Rule(
    name="compressed pool",
    says="A token of DeepSeek V4 is ratio x layers x 584 + layers by 4 / 4 x (584 + 132) + layers by 128 / 128 x 584 + "
    "ratio x ring / 128 x layers by 4 x 10,240; up to the middle of 2026 each token had a state of 128 tokens too.",
    records=("sg-dsv4-h20",),
    source=READ,
)
REQUESTS = Rule(
    name="request table",
    says="One row of int32 for each request that may run, as wide as the longest text: with 2,048 to 4,096 rows that "
    "is 0.3 to 1 GiB, taken from the rest after the pools are sized.",
    records=("fs-47444754202", "fs-46415979912", "fs-55068335887"),
    source=READ,
)
GRAPHS = Rule(
    name="graphs",
    says="Captured after the pools, so out of the rest: 7 to 29 MiB for each size of a decode graph in five logs, 19 "
    "the median; once 17.4 GiB for eleven sizes.",
    records=(
        *("fs-47444754202", "fs-46415979912", "fs-65830671609", "sg-fs-63199567676-a", "sg-fs-63199567676-b"),
        "sg-fs-62315510851",
    ),
    source="start-up logs",
)
PREFILL_GRAPHS = Rule(
    name="prefill graphs",
    says="Captured after the pools, so out of the rest: 0.28 and 3.85 GiB in the two logs that tell, where SGLang "
    "itself leaves 8 MiB for each size.",
    since=(0, 5, 10),
    records=("sg-fs-63199567676-b", "sg-fs-70920711276"),
    source="start-up logs; not yet in 0.5.9",
)
ACTIVATIONS = Rule(
    name="activations",
    says="Not measured by SGLang: this is our own closed form for a chunk of prompt, and for logits of the largest "
    "decode batch.",
    source="docs/engines.md",
)
LEFT = Rule(name="left free", says="What the rest has beyond graphs and activations.", source="docs/engines.md")
CONCURRENCY = Rule(
    name="running requests",
    says="max_running_requests is 512 sequences of full length, between 2,048 and 4,096, at most half of the tokens; "
    "with recurrent states at most a third of the slots (a fifth where overlap keeps two more).",
    records=("fs-47444754202", "fs-55068335887"),
    source=READ,
)
RANKS_AGREE = Rule(
    name="ranks agree",
    says="No rank may have less than 90 % of what another has free before the weights load.",
    source=READ,
)
