"""What a card allows: tokens a second that no engine can pass, from bytes that must be read and products to be made.

A decode step of B sequences with c tokens each takes at least

    max(weights / bandwidth, B * 2 * matrix elements / rate)  +  max(B * c * KV bytes / bandwidth, B * attention / rate)

where the embedding, a lookup, is not read, and attention is 4 * heads * head size * c operations a layer. A prompt of n
tokens takes n * 2 * matrix elements / rate, the head for its last token alone, and half the attention of n tokens each.
A workload is its prefill and its decodes one after the other, at the mean of its lengths, in full batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tonnage.bench.workloads import Workload
from tonnage.costs.config import ModelConfig
from tonnage.costs.kv import kv_layout
from tonnage.costs.layers import Attention, Dense
from tonnage.costs.weights import weights_layout

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
#: The dtype in which the rates are.
DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a card does in a second: bytes moved, and operations of matrix products in bfloat16."""

    bytes_per_second: float
    operations_per_second: float


#: By the card's name in the catalogue. As measured with one large copy and one large product, below the data sheet.
RATES: Mapping[str, Rates] = MappingProxyType({"H200": Rates(bytes_per_second=4.3e12, operations_per_second=790e12)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a model asks of a card.

    matrix_elements      of all layers; head_elements: of the projection onto the vocabulary
    read_bytes           of weights, in a decode step
    kv_bytes             of one token in all layers
    attention_operations   for one token that looks at one token, in all layers
    """

    matrix_elements: int
    head_elements: int
    read_bytes: int
    kv_bytes: int
    attention_operations: int

    @classmethod
    def of(cls, config: ModelConfig) -> Work | None:
        """Of a dense decoder with attention in every layer; None for any other, for which this arithmetic is wrong."""
        mixers = [mixer for layer in config.layers for mixer in layer.mixers]
        attention = [mixer for mixer in mixers if isinstance(mixer, Attention) and mixer.window is None]
        is_dense = all(isinstance(layer.feed_forward, Dense) for layer in config.layers)
        if not is_dense or len(attention) != len(mixers) or len(mixers) != config.num_layers:
            return None
        layout = weights_layout(config, dtype=DTYPE)
        matrices = {tensor.name: tensor for tensor in layout.tensors if len(tensor.shape) > 1}
        embedding = next(tensor for name, tensor in matrices.items() if name.endswith(EMBEDDING))
        head = matrices.get(HEAD)
        # Where the head is the embedding, it is read as a head.
        lookup_bytes = embedding.num_bytes if head is not None else 0
        group = kv_layout(config, kv_dtype=DTYPE).groups[0]
        return cls(
            matrix_elements=sum(
                tensor.num_elements for tensor in matrices.values() if tensor is not embedding and tensor is not head
            ),
            head_elements=embedding.num_elements,
            read_bytes=sum(tensor.num_bytes for tensor in layout.tensors) - lookup_bytes,
            kv_bytes=group.block_bytes // group.block_tokens,
            attention_operations=sum(2 * one.num_heads * (one.head_dim + one.v_head_dim) for one in attention),
        )


def decode_step_s(work: Work, rates: Rates, *, num_rows: int, context_tokens: float) -> float:
    """Seconds of one step of so many sequences with so many tokens each, at the least."""
    operations = num_rows * 2 * (work.matrix_elements + work.head_elements)
    attended = num_rows * context_tokens
    return max(work.read_bytes / rates.bytes_per_second, operations / rates.operations_per_second) + max(
        attended * work.kv_bytes / rates.bytes_per_second,
        attended * work.attention_operations / rates.operations_per_second,
    )


def prefill_s(work: Work, rates: Rates, *, num_tokens: float) -> float:
    """Seconds of one prompt among many, at the least."""
    attention = num_tokens * num_tokens / 2 * work.attention_operations
    operations = 2 * (num_tokens * work.matrix_elements + work.head_elements) + attention
    return operations / rates.operations_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Tokens a second that the card allows: over a whole workload, and while its sequences only decode."""

    input_tokens: float
    output_tokens: float
    decode_tokens: float

    @classmethod
    def of(cls, workload: Workload, work: Work, rates: Rates, *, max_batch_size: int) -> Limits:
        jobs = workload.jobs
        prompt = sum(job.num_input_tokens for job in jobs) / len(jobs)
        output = sum(job.num_output_tokens for job in jobs) / len(jobs)
        num_rows = min(len(jobs), max_batch_size)
        step = decode_step_s(work, rates, num_rows=num_rows, context_tokens=prompt + output / 2)
        # The first token of a request comes out of its prompt.
        seconds = prefill_s(work, rates, num_tokens=prompt) + (output - 1) * step / num_rows
        return cls(input_tokens=prompt / seconds, output_tokens=output / seconds, decode_tokens=num_rows / step)


def limits_of(workload: Workload, config: ModelConfig, *, card: str, dtype: str, max_batch_size: int) -> Limits | None:
    """None where the card's rates, or those of the dtype, are not known, or the model is of another kind."""
    work, rates = Work.of(config), RATES.get(card)
    if work is None or rates is None or dtype != DTYPE:
        return None
    return Limits.of(workload, work, rates, max_batch_size=max_batch_size)
