"""Plain weights that an engine packs while it loads them, as ``--quantization fp8`` asks for."""

from __future__ import annotations

from collections.abc import Mapping

from tonnage.costs.config import ModelConfig

#: What the engines make of plain weights, as config.json would say it: the matrices of the layers, embeddings and head
#: not (vLLM's and SGLang's documentation of online quantisation).
PACKINGS: Mapping[str, Mapping[str, object]] = {
    "fp8": {"quant_method": "fp8"},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
}


def as_loaded(config: ModelConfig, method: object) -> ModelConfig | None:
    """The model as it lies on the device. The same object where nothing is asked, or the checkpoint is packed already
    and the method only names how; None where it is not known what becomes of plain weights."""
    if method is None or config.quantisation is not None:
        return config
    packing = PACKINGS.get(str(method).lower())
    if packing is None:
        return None
    return ModelConfig.from_dict({**config.raw, "quantization_config": dict(packing)}, name=config.name)
