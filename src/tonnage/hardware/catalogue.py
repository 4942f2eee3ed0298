"""The cards. Totals are what ``cuMemGetInfo`` reports, below the marketing figure: the driver and ECC keep some.

``total.ref`` names the records. "starts": ids in ``tests/data/shapes/starts.jsonl``. "threads": public threads whose
engines printed the total. "torch": the "total capacity" of torch's own out-of-memory messages, which is the driver's
total. "nvidia-smi": the card's figure, which holds what the driver keeps and is the upper end. Where nothing tells the
context of a card, ``context`` is None and ``costs.context`` assumes an H200's with a wide bar.

Only the H200 was met in person. Bandwidths are those of the data sheets.
"""

from __future__ import annotations

from tonnage.hardware.card import Card, Form, from_catalogue, gib
from tonnage.terms import Quantity, Source
from tonnage.units import MiB

_GB = 10**9


def _total(best: str, low: str | None = None, high: str | None = None, *, ref: str) -> Quantity:
    return from_catalogue(gib(best), gib(low or best), gib(high or best), ref=ref)


def _mib(best: int, low: int, high: int, *, ref: str) -> Quantity:
    return from_catalogue(best * MiB, low * MiB, high * MiB, ref=ref)


def _system(best: str, low: str, high: str, *, ref: str) -> Quantity:
    return Quantity(bytes=gib(best), low=gib(low), high=gib(high), source=Source.ASSUMED, ref=ref)


_H100_CONTEXT = _mib(524, 480, 600, ref="0.51 GiB before the first look of one-card vLLM starts on an H100")

_ROCM_CONTEXT = _mib(512, 400, 700, ref="0.5 GiB beside torch in one-card vLLM starts on ROCm")
_ROCM_NOTE = "plans for other engines alone: Tonnage's own runs on CUDA"

_DATA_CENTRE = (
    Card(
        name="H200", kind="cuda", sm=90, num_sms=132, bandwidth=4_800 * _GB,
        aliases=("H200 SXM", "H200-141GB", "H200-141", "H200 NVL"),
        total=from_catalogue(150_109_880_320, high=143_167 * MiB,
            ref="cuMemGetInfo, driver 580; starts: fs-63396953296"),
        context=_mib(524, 480, 600, ref="first context, driver 580, CUDA 13.0"),
        libraries=_mib(164, 164, 330, ref="first bf16 matmul through torch; 98 MiB of it torch's own workspace"),
    ),
    Card(
        name="H100-80GB", kind="cuda", sm=90, num_sms=132, bandwidth=3_350 * _GB, context=_H100_CONTEXT,
        aliases=("H100", "H100 SXM", "H100 SXM5", "H100 80GB HBM3", "H100-80", "H100 PCIe", "H100 PCIe 80GB"),
        total=_total("79.19", "79.10", "79.22", ref="starts: vllm-10511-b, trtllm-doc-memory, llmd-* (25 starts)"),
    ),
    Card(
        name="H100-NVL", kind="cuda", sm=90, num_sms=132, bandwidth=3_900 * _GB, context=_H100_CONTEXT,
        aliases=("H100 NVL 94GB", "H100-94", "H100-94GB"),
        total=_total("93.10", "93.00", "94.50", ref="starts: trt-fs-10054575706, sg-fs-70920711276"),
    ),
    Card(
        name="H20-96GB", kind="cuda", sm=90, num_sms=78, bandwidth=4_000 * _GB, aliases=("H20", "H20-96"),
        total=_total("93.58", "93.00", "95.10", ref="starts: sg-dsv4-h20, trtllm-2683"),
    ),
    Card(
        name="H20-141GB", kind="cuda", sm=90, num_sms=78, bandwidth=4_800 * _GB, aliases=("H20-141", "H20-3e"),
        total=_total("139.80", "139.00", "140.40",
            ref="starts: recipes-12-a and -b, which differ in their share alone"),
        note="its total follows from two starts",
    ),
    Card(
        name="B200", kind="cuda", sm=100, num_sms=148, bandwidth=8_000 * _GB,
        aliases=("B200-180GB", "B200-180", "B200 SXM", "B200-192GB"),
        total=_total("178.35", high="178.36", ref="torch: 178.35 and 178.36 in ten logs; CUDA: 182,631 MiB"),
    ),
    Card(
        name="B300", kind="cuda", sm=103, num_sms=0, bandwidth=8_000 * _GB,
        aliases=("B300 SXM6 AC", "B300-288GB", "B300-288", "B300 SXM"),
        total=_total("267.69", "267.69", "276.60",
            ref="torch: 267.69 in three logs; nvidia-smi: 275,040 MiB; a start: 276.6"),
        note="one log has more than nvidia-smi shows",
    ),
    Card(
        name="GH200-96GB", kind="cuda", sm=90, num_sms=132, bandwidth=4_000 * _GB, form=Form.COHERENT,
        aliases=("GH200", "GH200 480GB", "GH200-96"),
        total=_total("94.88", high="95.00", ref="threads: litgpt#1892 (torch); OpenCL: 97,280 MB"),
    ),
    Card(
        name="GH200-144GB", kind="cuda", sm=90, num_sms=132, bandwidth=4_900 * _GB, form=Form.COHERENT,
        aliases=("GH200-144", "GH200 144G HBM3e"),
        total=_total("142.50", ref="threads: vllm#35313"),
    ),
    Card(
        name="A100-80GB", kind="cuda", sm=80, num_sms=108, bandwidth=2_039 * _GB,
        aliases=("A100 SXM4 80GB", "A100 80GB PCIe", "A100-80", "A100 PCIe 80GB", "A800-80GB"),
        total=_total("79.15", "79.10", "79.33",
            ref="starts: fs-57908690698 (79.14), trtllm-1400; logs from 79.14 to 79.25"),
        note="bandwidth of the SXM form",
    ),
    Card(
        name="A100-40GB", kind="cuda", sm=80, num_sms=108, bandwidth=1_555 * _GB,
        aliases=("A100 SXM4 40GB", "A100 PCIe 40GB", "A100-40"),
        total=_total("39.39", "39.38", "39.59", ref="starts: fs-55068335887; logs from 39.38 to 39.50"),
    ),
    Card(
        name="A30", kind="cuda", sm=80, num_sms=56, bandwidth=933 * _GB, aliases=("A30-24GB", "A30-24"),
        total=_total("23.50", "23.50", "23.69", ref="threads: ChatKBQA#2 (23.50), RB-Modulation#5 (23.53), both torch"),
    ),
    Card(
        name="L40S", kind="cuda", sm=89, num_sms=142, bandwidth=864 * _GB, aliases=("L40S-48GB", "L40S-48"),
        total=_total("44.39", "44.30", "44.60", ref="starts: fs-60430572081"), note="with ECC on, as shipped",
    ),
    Card(
        name="L40", kind="cuda", sm=89, num_sms=142, bandwidth=864 * _GB, aliases=("L40-48GB", "L40-48"),
        total=_total("44.40", "44.30", "44.60", ref="threads: Qwen3-VL#2097 (torch)"), note="with ECC on, as shipped",
    ),
    Card(
        name="L20", kind="cuda", sm=89, num_sms=92, bandwidth=864 * _GB, aliases=("L20-48GB", "L20-48"),
        total=_total("44.53", "44.40", "44.99",
            ref="threads: HunyuanCustom#36 (torch); nvidia-smi: 46,068 MiB"),
        note="with ECC on, as shipped",
    ),
    Card(
        name="L4", kind="cuda", sm=89, num_sms=58, bandwidth=300 * _GB, aliases=("L4-24GB", "L4-24"),
        total=_total("22.03", "21.95", "22.49", ref="starts: fs-51771234912 (an A10G or an L4)"),
        note="nominal: no log names the card beyond doubt",
    ),
    Card(
        name="A10", kind="cuda", sm=86, num_sms=72, bandwidth=600 * _GB,
        aliases=("A10-24GB", "A10G", "A10G-24GB", "A10-24", "A10G-24"),
        total=_total("22.06", "21.95", "22.49",
            ref="starts: kaito-2156-qwen3-8b, fs-51771234912; logs from 22.06 to 22.10"),
        note="the A10G of some clouds has 80 multiprocessors",
    ),
    Card(
        name="V100-32GB", kind="cuda", sm=70, num_sms=80, bandwidth=900 * _GB,
        aliases=("V100", "V100 SXM2 32GB", "V100-32", "V100 PCIe 32GB", "V100S PCIe 32GB"),
        total=_total("31.73", "31.73", "31.74", ref="starts: fs-4922787267, vllm-11352"),
    ),
    Card(
        name="T4", kind="cuda", sm=75, num_sms=40, bandwidth=300 * _GB, aliases=("T4-16GB", "Tesla T4", "T4-16"),
        total=_total("14.56", "14.56", "14.75", ref="starts: fs-55594152188, fs-7884883735"),
    ),
    Card(
        name="MI300X", kind="cuda", sm=0, num_sms=304, bandwidth=5_300 * _GB,
        aliases=("Instinct MI300X", "MI300X-192GB", "MI300X-192"),
        total=_total("191.98", "191.69", "191.98",
            ref="torch: 191.98 and 191.69 in ten logs; rocminfo: 201,310,208 KB"),
        context=_ROCM_CONTEXT, note=_ROCM_NOTE,
    ),
    Card(
        name="MI355X", kind="cuda", sm=0, num_sms=256, bandwidth=8_000 * _GB,
        aliases=("Instinct MI355X", "MI355X-288GB", "MI355X-288"),
        total=_total("287.98", ref="threads: ROCm/TheRock#2118 (torch, gfx950)"),
        context=_ROCM_CONTEXT, note=_ROCM_NOTE,
    ),
)  # fmt: skip

_WORKSTATION = (
    Card(
        name="RTX PRO 6000", kind="cuda", sm=120, num_sms=188, bandwidth=1_792 * _GB,
        aliases=(
            "RTX PRO 6000 Blackwell", "RTX PRO 6000 96GB", "RTX PRO 6000 Blackwell Workstation Edition",
            "RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Blackwell Max-Q Workstation Edition", "PRO 6000",
        ),
        total=_total("94.97", "94.96", "95.70", ref="torch: 94.96 to 94.98 in eight logs; engines: 95.6"),
    ),
    Card(
        name="RTX PRO 4500", kind="cuda", sm=120, num_sms=82, bandwidth=896 * _GB,
        aliases=("RTX PRO 4500 Blackwell", "RTX PRO 4500 32GB"),
        total=_total("31.38", "31.30", "31.50", ref="starts: vllm-51590"),
    ),
    Card(
        name="RTX A6000", kind="cuda", sm=86, num_sms=84, bandwidth=768 * _GB,
        aliases=("A6000", "RTX A6000-48GB", "A6000-48"),
        total=_total("47.53", "44.40", "47.54",
            ref="torch: 47.53, 47.50, 47.40 in nine logs; with ECC on nvidia-smi: 46,068 MiB"),
        note="with ECC off, as shipped; ECC keeps 3 GiB, and no log names the card beyond doubt",
    ),
    Card(
        name="RTX 6000 Ada", kind="cuda", sm=89, num_sms=142, bandwidth=960 * _GB,
        aliases=("6000 Ada", "RTX 6000 Ada Generation", "RTX 6000 Ada 48GB"),
        total=_total("44.43", "44.40", "47.54", ref="threads: MTVCrafter#21 (torch, ECC on)"), note="with ECC on",
    ),
    Card(
        name="RTX 5090", kind="cuda", sm=120, num_sms=170, bandwidth=1_792 * _GB, aliases=("5090", "RTX5090-32GB"),
        total=_total("31.36", "31.30", "31.85", ref="starts: club3090-612; threads: Wan2.1#465 (31.37, torch)"),
        note="a display takes some more",
    ),
    Card(
        name="RTX 4090", kind="cuda", sm=89, num_sms=128, bandwidth=1_008 * _GB, aliases=("4090", "RTX4090-24GB"),
        total=_total("23.55", "23.50", "23.69", ref="starts: vllm-13061; threads: CogVideo#36 (23.68, torch)"),
        note="a display takes some more",
    ),
    Card(
        name="RTX 3090", kind="cuda", sm=86, num_sms=82, bandwidth=936 * _GB, aliases=("3090", "RTX3090-24GB"),
        total=_total("23.58", "23.50", "23.69", ref="starts: vllm-10517-29k"), note="a display takes some more",
    ),
    Card(
        name="RTX 2080 Ti 22GB", kind="cuda", sm=75, num_sms=68, bandwidth=616 * _GB,
        aliases=("2080 Ti 22GB", "RTX2080Ti-22GB", "RTX 2080 Ti", "2080 Ti"),
        total=_total("21.66", "21.50", "22.00",
            ref="starts: fs-39687024550, fs-38730122894; threads: memo#33 (22.00, Windows)"),
        note="with its memory doubled by hand; as sold it has 11 GB",
    ),
    Card(
        name="RX 7900 XTX", kind="cuda", sm=0, num_sms=96, bandwidth=960 * _GB,
        aliases=("Radeon RX 7900 XTX", "7900 XTX", "AMD-24GB (RX7900)"),
        total=_total("23.98", ref="starts: fs-6727521558"), context=_ROCM_CONTEXT, note=_ROCM_NOTE,
    ),
)  # fmt: skip

_UNIFIED = (
    Card(
        name="GB10", kind="cuda", sm=121, num_sms=48, bandwidth=273 * _GB, form=Form.UNIFIED,
        aliases=("DGX Spark", "GB10-128GB", "Spark"),
        total=_total("121.69", "119.67", "121.70",
            ref="starts: glm53spark-204, dsv4spark-4-a; threads: gpud#1170 (119.68)"),
        system=_system(
            "8.62", "3.00", "19.70",
            ref="threads: nvitop#208 (113.07 GiB available at rest), GLM-5.3-Flash-EXL3-2x-DGX-Sparks#47 (102)",
        ),
        note="the driver's total is the machine's",
    ),
    Card(
        name="Jetson Orin 32GB", kind="cuda", sm=87, num_sms=14, bandwidth=205 * _GB, form=Form.UNIFIED,
        aliases=("Orin", "Orin-32", "JetsonOrin-32GB", "AGX Orin 32GB", "Jetson AGX Orin 32GB", "Orin 32GB"),
        total=_total("29.96", "29.95", "30.70", ref="starts: fs-63135534711-a, fs-63220100624"),
        system=_system("2.50", "1.00", "6.00", ref="assumed: no log at hand tells it"),
        note="the driver's total is the machine's",
    ),
)  # fmt: skip

CARDS: tuple[Card, ...] = (*_DATA_CENTRE, *_WORKSTATION, *_UNIFIED)
