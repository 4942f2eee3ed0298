"""GGUF to dense float32 safetensors and tokenizer, as a program: ``python -m tonnage.engine.convert FILE FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def convert(gguf: Path, folder: Path) -> None:
    """Read ``gguf`` through transformers, dequantised, and save it with its tokenizer into ``folder``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Without dequantize=True the model stays marked as quantised and refuses to be saved.
    model: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    _mend_end_token(tokenizer, model)
    tokenizer.save_pretrained(folder)


def _mend_end_token(tokenizer: Any, model: Any) -> None:
    """Some transformers releases read the wrong end token from a GGUF; the model's own config is right."""
    end = model.generation_config.eos_token_id
    end = model.config.eos_token_id if end is None else end
    first = end[0] if isinstance(end, list) else end
    if first is not None:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(first)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
