"""Which files describe a model that generates text at all: the others have no KV cache to plan for."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tonnage.errors import UnsupportedModel

#: Ends of class names that write tokens one after the other; any of them outweighs the lists below.
_WRITES = re.compile(r"CausalLM|ConditionalGeneration|LMHead|Seq2Seq|Vision2Seq|ImageTextToText|TextGeneration")
#: Ends of class names that give a label, a score, a vector or an image.
_OTHER = re.compile(
    r"For(?:MaskedLM|PreTraining|\w*Classification|\w*Regression|QuestionAnswering|MultipleChoice|NextSentence\w*"
    r"|\w*Detection|\w*Segmentation|\w*Retrieval|\w*Similarity|\w*Embedding|RewardModel\w*|CTC|MaskedImageModeling"
    r"|DepthEstimation|XVector)$|EncoderModel$|RewardModel$"
)
#: Families that only encode, for files whose classes say no more than the family's name.
_ENCODERS = frozenset((
    "bert", "roberta", "xlm-roberta", "xlm-roberta-xl", "distilbert", "albert", "electra", "deberta", "deberta-v2",
    "camembert", "mpnet", "nomic_bert", "modernbert", "eurobert", "longformer", "big_bird", "funnel", "layoutlm",
    "layoutlmv3", "vit", "vit_mae", "deit", "beit", "swin", "swinv2", "dinov2", "dinov3_vit", "convnext", "convnextv2",
    "resnet", "segformer", "detr", "yolos", "sam", "clip", "clip_text_model", "clip_vision_model", "chinese_clip",
    "siglip", "siglip2", "siglip_vision_model", "siglip_text_model", "clap", "wav2vec2", "hubert", "wavlm", "unispeech",
    "data2vec-audio", "audio-spectrogram-transformer", "encodec", "vits", "timm_wrapper", "esm",
))  # fmt: skip
_REMEDY = "name a model that writes text: its class ends in ForCausalLM or ForConditionalGeneration"


def refuse_other_models(raw: Mapping[str, object], *, name: str) -> None:
    """Raise ``UnsupportedModel`` for an encoder, a classifier, an image model or a part of a diffusion pipeline."""
    part = raw.get("_class_name")
    if isinstance(part, str) and not raw.get("model_type"):
        raise _refusal(name, f"{part}, a part of a diffusion pipeline,")
    listed = raw.get("architectures")
    classes = [str(each) for each in listed] if isinstance(listed, list) else []
    if any(_WRITES.search(each) for each in classes):
        return
    for each in classes:
        if _OTHER.search(each):
            raise _refusal(name, each)
    family = str(raw.get("model_type"))
    if family in _ENCODERS:
        raise _refusal(name, classes[0] if classes else f"the family {family!r}")


def _refusal(name: str, what: str) -> UnsupportedModel:
    return UnsupportedModel(f"{name}: {what} is not a model that generates text", remedy=_REMEDY)
