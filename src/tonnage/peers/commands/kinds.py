"""What the flags that decide about memory hold, engine by engine, and the other names that they go by."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Kind(StrEnum):
    """How the text of a flag is read."""

    COUNT = "count"  # a whole number, in digits alone
    TOKENS = "tokens"  # a whole number, with the suffixes that vLLM, or that SGLang reads
    NUMBER = "number"  # a whole number that may be negative
    LENGTH = "length"  # tokens; -1 and auto are to be fitted
    SHARE = "share"  # 0 < share <= 1, exact
    RATIO = "ratio"  # any exact number
    BYTES = "bytes"
    GIB = "gib"  # a bare number of GiB
    SWITCH = "switch"
    WORD = "word"
    JSON = "json"
    COUNTS = "counts"  # several whole numbers


def _table(**names: str) -> dict[str, Kind]:
    return {name: Kind(kind) for kind, listed in names.items() for name in listed.split()}


VLLM = _table(
    count="max_num_seqs block_size tensor_parallel_size pipeline_parallel_size "
    "data_parallel_size data_parallel_size_local decode_context_parallel_size prefill_context_parallel_size "
    "max_loras max_lora_rank max_cpu_loras lora_extra_vocab_size num_gpu_blocks_override max_seq_len_to_capture "
    "max_cudagraph_capture_size "
    "nnodes num_scheduler_steps long_prefill_token_threshold api_server_count num_speculative_tokens",
    tokens="max_num_batched_tokens",
    number="max_logprobs optimization_level seed",
    length="max_model_len",
    share="gpu_memory_utilization",
    bytes="kv_cache_memory_bytes",
    gib="cpu_offload_gb kv_offloading_size swap_space mm_processor_cache_gb mm_ipc_gpu_memory_gb",
    switch="enforce_eager enable_prefix_caching enable_chunked_prefill enable_expert_parallel enable_eplb enable_dbo "
    "disable_hybrid_kv_cache_manager disable_sliding_window enable_lora enable_sleep_mode async_scheduling "
    "disable_custom_all_reduce skip_mm_profiling language_model_only fully_sharded_loras trust_remote_code headless "
    "enable_cumem_allocator enable_prompt_embeds mm_encoder_only scheduler_reserve_full_isl calculate_kv_scales grpc "
    "return_tokens_as_token_ids use_v2_block_manager",
    word="kv_cache_dtype dtype quantization mamba_cache_dtype mamba_ssm_cache_dtype mamba_cache_mode attention_backend "
    "load_format distributed_executor_backend all2all_backend moe_backend speculative_model runner task lora_dtype",
    json="compilation_config speculative_config limit_mm_per_prompt hf_overrides kv_transfer_config",
    counts="cudagraph_capture_sizes cuda_graph_sizes",
)  # fmt: skip
SGLANG = _table(
    count="tp_size pp_size dp_size ep_size max_running_requests page_size cuda_graph_max_bs cuda_graph_max_bs_decode "
    "max_mamba_cache_size speculative_num_draft_tokens speculative_num_steps speculative_eagle_topk "
    "max_loras_per_batch max_lora_rank attn_dp_size moe_dense_tp_size nnodes cpu_offload_gb hicache_size dcp_size",
    tokens="max_total_tokens max_prefill_tokens context_length",
    number="chunked_prefill_size node_rank",
    share="mem_fraction_static",
    ratio="mamba_full_memory_ratio swa_full_tokens_ratio hicache_ratio",
    switch="disable_cuda_graph disable_radix_cache enable_dp_attention enable_torch_compile enable_hierarchical_cache "
    "disable_hybrid_swa_memory enable_memory_saver enable_mixed_chunk disable_custom_all_reduce trust_remote_code "
    "enable_piecewise_cuda_graph disable_piecewise_cuda_graph disable_overlap_schedule enable_lora enable_metrics "
    "enable_p2p_check enable_ep_moe enable_dp_lm_head enable_cache_report log_requests skip_server_warmup "
    "enable_multimodal is_embedding",
    word="kv_cache_dtype dtype quantization speculative_algorithm speculative_draft_model_path attention_backend "
    "mamba_ssm_dtype load_format moe_a2a_backend disaggregation_mode cuda_graph_backend_decode "
    "cuda_graph_backend_prefill mamba_radix_cache_strategy mamba_scheduler_strategy",
    json="json_model_override_args model_loader_extra_config",
    counts="cuda_graph_bs cuda_graph_bs_decode piecewise_cuda_graph_tokens",
)  # fmt: skip
TRTLLM = _table(
    count="tp_size pp_size cp_size ep_size max_batch_size max_num_tokens max_seq_len "
    "max_beam_width gpus_per_node tokens_per_block max_input_len num_nextn_predict_layers max_draft_len cluster_size "
    "num_postprocess_workers max_loras max_lora_rank",
    share="free_gpu_memory_fraction",
    bytes="max_gpu_total_bytes host_cache_size",
    number="max_tokens",
    switch="trust_remote_code enable_chunked_prefill enable_block_reuse enable_attention_dp disable_overlap_scheduler "
    "enable_padding fail_fast_on_attention_window_too_large enable_partial_reuse",
    word="backend kv_cache_dtype dtype cuda_graph_config mamba_ssm_cache_dtype quantization attn_backend moe_backend",
    json="speculative_config moe_config max_attention_window torch_compile_config",
    counts="batch_sizes",
)
KINDS: Mapping[str, Mapping[str, Kind]] = {"vllm": VLLM, "sglang": SGLANG, "trtllm": TRTLLM}

#: As it may be typed, without dashes in front -> the name that its engine's rules know.
ALIASES: Mapping[str, Mapping[str, str]] = {
    "vllm": {
        "tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size",
        "dcp": "decode_context_parallel_size", "pcp": "prefill_context_parallel_size", "q": "quantization",
        "O": "optimization_level", "cc": "compilation_config", "sc": "speculative_config", "ac": "attention_config",
        "n": "nnodes", "r": "node_rank", "ep": "enable_expert_parallel", "asc": "api_server_count",
        "dpl": "data_parallel_size_local",
        "device_memory_utilization": "gpu_memory_utilization", "kv_cache_memory": "kv_cache_memory_bytes",
        "model_tag": "model",
    },
    "sglang": {
        "tp": "tp_size", "tensor_parallel_size": "tp_size", "pp": "pp_size", "pipeline_parallel_size": "pp_size",
        "dp": "dp_size", "data_parallel_size": "dp_size", "ep": "ep_size", "expert_parallel_size": "ep_size",
        "model": "model_path", "attention_data_parallel_size": "attn_dp_size", "enable_hicache":
        "enable_hierarchical_cache", "speculative_draft_model": "speculative_draft_model_path",
        "decode_context_parallel_size": "dcp_size",
    },
    "trtllm": {
        "tensor_parallel_size": "tp_size", "pipeline_parallel_size": "pp_size", "context_parallel_size": "cp_size",
        "moe_expert_parallel_size": "ep_size", "kv_cache_free_gpu_memory_fraction": "free_gpu_memory_fraction",
        "config": "extra_llm_api_options", "moe_cluster_parallel_size": "cluster_size",
    },
}  # fmt: skip
#: Flags that hold the model's name, and those that name a file of more flags.
MODEL_FLAGS = {"vllm": ("model",), "sglang": ("model_path",), "trtllm": ("model",)}
FILE_FLAGS = {"vllm": "config", "sglang": "config", "trtllm": "extra_llm_api_options"}
#: Beginnings of names that stand alone on a command line in all three.
SWITCH_PREFIXES = ("enable_", "disable_", "no_", "skip_", "use_", "allow_", "return_", "log_")


def canonical(engine: str, typed: str) -> str:
    """The name under which a flag is kept: no dashes in front, underscores inside, aliases resolved."""
    name = typed.lstrip("-")
    if name in ALIASES[engine]:  # a capital letter counts: vLLM's -O
        return ALIASES[engine][name]
    name = name.replace("-", "_")
    head, dot, key = name.partition(".")  # vLLM: --compilation-config.cudagraph_mode NONE
    head = head if head == "O" else head.lower()
    return ALIASES[engine].get(head, head) + dot + key


def kind_of(engine: str, name: str) -> Kind | None:
    """How the flag's text is read; None for a flag that does not decide about memory."""
    return KINDS[engine].get(name)


def is_switch(engine: str, name: str) -> bool:
    """Whether the flag stands alone."""
    kind = kind_of(engine, name)
    return kind is Kind.SWITCH or (kind is None and name.startswith(SWITCH_PREFIXES))
