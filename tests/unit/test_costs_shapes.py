"""The built-in shapes against published counts of parameters, logged weights, and what was recorded of them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import shapes

from tonnage.costs import shapes as built_in
from tonnage.costs.config import ModelConfig
from tonnage.costs.models import find_config
from tonnage.costs.price import weights_price
from tonnage.costs.shapes import close_shapes, find_shape, help_text, shape_names
from tonnage.errors import ModelNotFound
from tonnage.hardware import card_for
from tonnage.planner import plan_without_device
from tonnage.terms import Rank
from tonnage.units import GiB, TiB

#: Parameters as the models' own pages count them in the published files. Collected by hand; where a file holds layers
#: for multi-token prediction they are counted there too.
PUBLISHED = {
    "codellama-7b": 6_738_546_688, "deepseek-coder-6.7b": 6_740_512_768, "deepseek-v2-lite": 15_706_484_224,
    "gemma-2-2b": 2_614_341_888, "gemma-2-9b": 9_241_705_984, "gemma-2-27b": 27_227_128_320,
    "gemma-3-4b": 4_300_079_472, "gemma-3-12b": 12_187_325_040, "gemma-3-27b": 27_432_406_640,
    "gemma-7b": 8_537_680_896, "gpt-oss-20b": 20_914_757_184, "gpt-oss-120b": 116_829_156_672, "gpt2": 124_439_808,
    "granite-3.1-2b": 2_533_531_648, "granite-3.1-8b": 8_170_848_256, "granite-4.0-h-micro": 3_191_396_096,
    "lfm2-700m": 742_489_344, "llama-2-7b": 6_738_415_616, "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248, "llama-3.1-70b": 70_553_706_496, "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-3b": 3_212_749_824, "llama-3.2-11b-vision": 10_670_220_835, "llama-4-scout": 108_641_793_536,
    "minimax-m2": 228_689_748_992, "mistral-7b": 7_241_732_096, "mistral-small-3.1-24b": 24_011_361_280,
    "mixtral-8x7b": 46_702_792_704, "opt-125m": 125_239_296, "phi-2": 2_779_683_840, "phi-4": 14_659_507_200,
    "phi-3-mini": 3_821_079_552, "phi-4-mini": 3_836_021_760, "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "qwen1.5-7b": 7_721_324_544, "qwen1.5-moe-a2.7b": 14_315_784_192, "qwen2-vl-7b": 8_291_375_616,
    "qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512, "qwen2.5-14b": 14_770_033_664, "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648, "qwen2.5-vl-3b": 3_754_622_976, "qwen2.5-vl-7b": 8_292_166_656,
    "qwen2.5-vl-72b": 73_410_777_344, "qwen3-0.6b": 596_049_920, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264, "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560, "qwen3-coder-480b-a35b": 480_154_875_392, "qwen3-vl-2b": 2_127_532_032,
    "qwen3-vl-8b": 8_767_123_696, "qwen3-vl-32b": 33_357_390_064, "qwen3.5-2b": 2_274_069_824,
    "qwen3.5-9b": 9_653_104_368, "qwen3.5-122b-a10b": 125_086_497_008, "qwen3.5-397b-a17b": 403_397_928_944,
    "qwen3.6-27b": 27_781_427_952, "qwen3.6-35b-a3b": 35_951_822_704, "tinyllama-1.1b": 1_100_048_384,
    "qwen3-1.7b": 1_720_574_976, "qwen3-vl-4b": 4_437_815_808, "qwen3-vl-30b-a3b": 31_070_754_032,
    "qwen3-vl-235b-a22b": 235_670_022_896, "llama-4-maverick": 401_583_781_376, "mixtral-8x22b": 140_630_071_296,
    "nemotron-3-super-120b": 123_611_012_096, "Qwen/Qwen3.5-27B": 27_781_427_952,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000, "google/gemma-3-27b-it": 27_432_406_640,
}  # fmt: skip
#: Published counts that are met to a share, and why not to the last one.
NEARLY = {
    "deepseek-v3": (671_026_419_200, 1e-6),  # corrections of the routers, which are no parameters of the class
    "kimi-k2": (1_026_408_232_448, 1e-6),  # as above
    "kimi-linear-48b": (49_122_681_728, 1e-6),  # as above
    "nemotron-3-nano-30b": (31_577_940_288, 1e-6),  # as above
    "glm-5": (753_864_139_008, 1e-6),  # as above
    "deepseek-v4-flash": (284_000_000_000, 0.005),  # told in thousand millions
    "deepseek-v4-pro": (1_600_000_000_000, 0.02),  # told as 1.6T
    "mistral-small-4-119b": (119_000_000_000, 0.005),  # told in thousand millions
    "gemma-4-31b": (31_273_088_876, 0.005),  # the tower's class is known by its sizes alone
    "kimi-vl-a3b": (16_407_657_776, 0.005),  # as above
    "mimo-v2-flash": (309_785_318_400, 0.005),  # the file holds layers for several tokens that its config does not name
    "glm-4.7": (358_337_791_296, 0.005),  # its extra layer has tables of its own
    "zai-org/GLM-4.5": (358_337_791_296, 0.005),  # as above
    "deepseek-v3.2": (685_355_329_792, 0.005),  # as above
    "glm-4.5-air": (110_468_824_832, 0.012),  # as above, and the model is small
    "glm-5.3": (753_329_940_480, 2e-5),  # a hundred-thousandth is not explained
    "gemma-4-26b-a4b": (26_000_000_000, 0.01),  # told in thousand millions
    "qwen3-next-80b-a3b": (81_324_862_720, 0.025),  # as above, and its config does not name the layer
}

#: Logged weights that are no sum of tensors, by the start's id.
ODD = {
    "fs-47444754202": "a difference in free memory, and the model is tiny",
    "fs-9542409931": "a difference in free memory, and the model is tiny",
    "fs-52853901169": "a difference in free memory, and the model is tiny",
    "fs-55068335887": "a difference in free memory, and the model is tiny",
    "fs-46415979912": "a difference in free memory, and the model is tiny",
    "fs-53944457073": "a difference in free memory",
    "fs-33197864785": "a packed model so small that padding and the tied head show",
    "fs-33220888888": "a packed model so small that padding and the tied head show",
    "vllm-51590": "kernels pad the experts' matrices: inside the bar",
    "vllm-23278": "kernels pad the experts' matrices: inside the bar",
    "llmd-emp-gpt-oss-120b-tp1": "kernels pad the experts' matrices: inside the bar",
    "fs-57361824903": "the encoder's workspace is in the figure",
    "dsv3-205": "stages of uneven numbers of layers",
}


def counts_of(name: str) -> tuple[int, int]:
    """Without and with layers for multi-token prediction."""
    config = find_config(name)
    return weights_price(config).num_parameters, weights_price(config, with_mtp=True).num_parameters


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_published_files(name):
    assert PUBLISHED[name] in counts_of(name)


@pytest.mark.parametrize(
    ("name", "vocabulary", "hidden", "corrections"),
    [("glm-4.5-air", 151_552, 4096, 46 * 128), ("deepseek-v3.2", 129_280, 7168, 59 * 256)],
)  # fmt: skip
def test_what_is_missing_are_tables_of_the_extra_layer_and_corrections_of_routers(
    name, vocabulary, hidden, corrections
):
    """To the last one: embeddings and a head of its own, and one correction for each expert of each layer with experts,
    45 and the extra one, 58 and the extra one."""
    assert NEARLY[name][0] - counts_of(name)[1] == 2 * vocabulary * hidden + corrections


@pytest.mark.parametrize("name", NEARLY)
def test_parameters_are_nearly_those_of_the_published_files(name):
    published, share = NEARLY[name]
    assert min(abs(count / published - 1) for count in counts_of(name)) <= share


def test_every_shape_is_counted():
    """But one, whose page counts another form of it."""
    assert set(shape_names()) - set(PUBLISHED) - set(NEARLY) == {"gpt-j-6b"}


def plain_starts() -> list[dict]:
    """Starts whose model resolves as it was logged, unpacked or packed as its name says, with weights in the log."""
    found = []
    for row in shapes.starts():
        shape = find_shape(row["model"])
        if shape is None or "weights_gib" not in row["logged"]:
            continue
        is_packed = "quantization_config" in shape.config
        if is_packed == (row["quant"] != "none"):
            found.append(row)
    return found


@pytest.mark.parametrize("row", plain_starts(), ids=lambda row: row["id"])
def test_weights_are_those_that_engines_logged(row):
    rank = Rank(size=row["tp"] * row["pp"], tp=row["tp"], pp=row["pp"])
    price, logged = weights_price(find_config(row["model"]), rank=rank).quantity, row["logged"]["weights_gib"] * GiB
    is_close = abs(price.bytes / logged - 1) <= 0.03
    assert is_close == (row["id"] not in ODD)
    if "inside the bar" in ODD.get(row["id"], ""):
        assert price.low <= logged <= price.high * 1.02


def test_enough_starts_are_compared():
    rows = plain_starts()
    assert len(rows) >= 45
    assert {row["id"] for row in rows} >= set(ODD)


#: Facts of the record that a config.json does not hold under that name, or not at all.
NOT_FIELDS = (
    "source", "read_from", "note", "confidence", "head_dim", "full_attention_layers", "sliding_pattern", "kda",
    "compress_ratio_counts", "kv_record_bytes_fp8", "indexer_record_bytes", "mamba_layers", "linear_num_key_heads",
    "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
)  # fmt: skip
#: Where the record holds another form of the model.
CORRECTED = {("mistral-7b", "vocab_size"): 32_000}


@pytest.mark.parametrize("key", shapes.complete())
def test_a_shape_holds_what_was_recorded_of_it(key):
    from tonnage.costs.reading import Fields

    fields, record = Fields(shapes.raw_config(key), name=key), shapes.shapes()[key]
    for name, value in record.items():
        if name not in NOT_FIELDS and value is not None:
            found = fields.flag(name) if isinstance(value, bool) else fields.value(name)
            assert found == CORRECTED.get((key, name), value), name


@pytest.mark.parametrize("key", shapes.complete())
def test_heads_are_as_wide_as_recorded(key):
    config, record = shapes.config(key), shapes.shapes()[key]
    if "kv_lora_rank" not in record and record["head_dim"] is not None:
        assert config.head_dim == record.get("global_head_dim", record["head_dim"])


def test_every_id_of_the_record_that_is_one_resolves():
    models = json.loads((shapes.DATA / "model-configs.json").read_text(encoding="utf-8"))["models"]
    ids = [name for name, key in models.items() if key is not None and "/" in name and " " not in name]
    #: Another quantisation than any that a shape is kept with, and a name in which several sizes share a line.
    odd = {"nvidia/Qwen3.8-27B-NVFP4"}
    assert {name for name in ids if find_shape(name) is None} == odd
    assert len(ids) > 90


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("llama-3.1-8b", "llama-3.1-8b"),
        ("Llama 3.1 8B", "llama-3.1-8b"),
        ("LLAMA_3.1_8b", "llama-3.1-8b"),
        ("llama3.1-8b", "llama-3.1-8b"),
        ("Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("meta-llama/llama-3.1-8b", "llama-3.1-8b"),
        ("llama-3-8b", "meta-llama/Meta-Llama-3-8B"),
        ("qwen/qwen2.5-7b-instruct", "qwen2.5-7b"),
        ("gpt-oss 120b", "gpt-oss-120b"),
    ],
)
def test_spellings(text, name):
    shape = find_shape(text)
    assert shape is not None
    assert shape.name == name


@pytest.mark.parametrize(
    "text", ["", "  ", "/", "somebody/llama-3.1-8b", "./llama-3.1-8b", "llama-3.1-8b.json", "héhé"]
)
def test_what_is_no_name(text):
    assert find_shape(text) is None


def test_no_two_names_are_spelt_alike():
    data = built_in._data()
    names = Counter(built_in._plain(name) for name in [*data["shapes"], *data["names"]])
    assert max(names.values()) == 1
    assert all(entry["source"] in ("read", "known", "inferred") for entry in data["shapes"].values())
    assert all(bool(entry.get("from")) == (entry["source"] != "known") for entry in data["shapes"].values())


def test_other_ids_differ_where_their_files_do():
    llama3, distilled = find_config("meta-llama/Meta-Llama-3-8B"), find_config("DeepSeek-R1-Distill-Qwen-1.5B")
    assert (llama3.max_position_embeddings, llama3.layers) == (8192, find_config("llama-3.1-8b").layers)
    assert not distilled.tie_word_embeddings
    packed = find_config("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16")
    assert weights_price(packed).quantity.bytes < weights_price(find_config("llama-3.1-8b")).quantity.bytes / 2
    wide = find_config("meta-llama/Llama-3.2-11B-Vision")  # a field inside its vision part
    assert wide.towers != find_config("llama-3.2-11b-vision").towers


@pytest.mark.parametrize("name", [*built_in._data()["shapes"], *built_in._data()["names"]])
def test_every_name_has_a_plan(name):
    config = find_config(name)
    made = plan_without_device(config, card=card_for(None, 16 * TiB))
    assert made.kv.tokens >= config.max_position_embeddings
    shape = find_shape(name)
    assert shape is not None
    for note in shape.notes:
        assert f"{config.name}: {note}" in made.warnings


def test_an_inferred_shape_says_so():
    assert any("inferred" in note for note in find_config("mistral-small-4-119b").notes)
    assert any("not counted" in note for note in find_config("llava-hf/llava-1.5-7b-hf").notes)


def test_a_model_whose_shape_nobody_told():
    with pytest.raises(ModelNotFound, match=r"^ling-3\.0-flash is not among the built-in shapes: of its shape only"):
        find_config("Ling-3.0-Flash")


def test_close_names():
    assert close_shapes("lama-3.1-8b")[0] == "llama-3.1-8b"
    assert close_shapes("qwen3-31b")[0] == "qwen3-32b"
    assert close_shapes("meta-lama/Llama-3.1-8B-Instruct")[0] == "meta-llama/Llama-3.1-8B-Instruct"
    assert close_shapes("zzz") == ()


def test_a_path_wins_over_a_shape(tmp_path, monkeypatch):
    folder = tmp_path / "llama-3.1-8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(find_shape("qwen3-8b").config))
    monkeypatch.chdir(tmp_path)
    assert find_config("llama-3.1-8b").model_type == "qwen3"
    (folder / "config.json").unlink()
    with pytest.raises(ModelNotFound, match=r"the folder holds no config\.json"):
        find_config("llama-3.1-8b")


def test_the_list_names_every_shape():
    told = help_text()
    assert all(f"  {name} " in told for name in shape_names())
    assert all(len(line) <= 110 for line in told.splitlines())


def test_the_file_stays_small():
    assert (Path(built_in.__file__).parent / "data" / "shapes.json").stat().st_size < 80_000


def test_an_explicit_null_is_no_missing_field():
    """DeepSeek-V2-Lite has no latent for its queries, and its file says so with a null."""
    raw = dict(find_shape("deepseek-v2-lite").config)
    assert "q_lora_rank" in raw
    del raw["q_lora_rank"]
    assert weights_price(ModelConfig.from_dict(raw)).num_parameters != counts_of("deepseek-v2-lite")[0]
