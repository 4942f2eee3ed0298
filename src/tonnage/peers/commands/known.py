"""Which release of an engine reads which flag, and what became of those that it no longer reads."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from tonnage.peers.version import Version

_DATA = Path(__file__).parent / "data"


def words_of(text: str) -> frozenset[str]:
    """The words of a text, as a set."""
    return frozenset(text.split())


#: Flags of the front ends and of wrappers, which decide nothing here and come and go with less notice.
FRONT_END = words_of(
    "model model_path host port served_model_name uds api_key config api_server_count headless root_path chat_template "
    "chat_template_content_format allow_credentials allowed_origins allowed_methods allowed_headers ssl_keyfile "
    "ssl_certfile ssl_ca_certs ssl_cert_reqs enable_ssl_refresh ssl_ciphers middleware uvicorn_log_level "
    "disable_uvicorn_access_log disable_access_log_for_endpoints disable_fastapi_docs enable_offline_docs lora_modules "
    "prompt_adapters response_role enable_auto_tool_choice tool_call_parser tool_parser_plugin tool_server "
    "exclude_tools_when_tool_choice_none return_tokens_as_token_ids enable_request_id_headers "
    "enable_prompt_tokens_details enable_server_load_tracking "
    "enable_force_include_usage enable_tokenizer_info_endpoint enable_log_outputs "
    "enable_log_deltas enable_flash_late_interaction max_log_len log_config_file h11_max_incomplete_event_size "
    "h11_max_header_count grpc grpc_port trust_request_chat_template default_chat_template_kwargs fingerprint_mode "
    "disable_frontend_multiprocessing log_error_stack tokens_only https node_rank enable_log_requests "
    "disable_log_requests data_parallel_supervisor_port helper help version log_level"
)
#: What ``trtllm-serve`` reads on its command line: tensorrt_llm/commands/serve.py at 00209af1. Its options file holds
#: a hundred more, which are not judged.
TRTLLM = words_of(
    "tokenizer custom_tokenizer host port backend log_level max_beam_width max_batch_size max_num_tokens max_seq_len "
    "tp_size pp_size cp_size ep_size cluster_size gpus_per_node free_gpu_memory_fraction num_postprocess_workers "
    "trust_remote_code revision extra_llm_api_options reasoning_parser tool_parser metadata_server_config_file "
    "server_role fail_fast_on_attention_window_too_large otlp_traces_endpoint disagg_cluster_uri "
    "enable_chunked_prefill media_io_kwargs chat_template grpc kv_cache_dtype model"
)
#: Flags that are gone, and what has their place, by the messages and the help of the releases that were looked at.
INSTEAD: dict[tuple[str, str], str] = {
    ("vllm", "cuda_graph_sizes"): "--cudagraph-capture-sizes",
    ("vllm", "max_seq_len_to_capture"): "--cudagraph-capture-sizes, or nothing",
    ("vllm", "speculative_model"): "--speculative-config with a JSON object",
    ("vllm", "num_speculative_tokens"): "--speculative-config with num_speculative_tokens in it",
    ("vllm", "guided_decoding_backend"): "--structured-outputs-config.backend",
    ("vllm", "task"): "--runner and --convert",
    ("vllm", "rope_scaling"): "--hf-overrides with rope_scaling in it",
    ("vllm", "rope_theta"): "--hf-overrides with rope_theta in it",
    ("vllm", "override_pooler_config"): "--pooler-config",
    ("vllm", "enable_reasoning"): "--reasoning-parser alone",
    ("vllm", "worker_use_ray"): "--distributed-executor-backend ray",
    ("vllm", "disable_mm_preprocessor_cache"): "--mm-processor-cache-gb 0",
    ("vllm", "enable_multimodal_encoder_data_parallel"): "--mm-encoder-tp-mode data",
    ("vllm", "use_v2_block_manager"): "nothing",
    ("vllm", "swap_space"): "nothing",
    ("vllm", "num_scheduler_steps"): "nothing",
    ("sglang", "cuda_graph_max_bs"): "--cuda-graph-max-bs-decode",
    ("sglang", "cuda_graph_bs"): "--cuda-graph-bs-decode",
    ("sglang", "mamba_scheduler_strategy"): "--mamba-radix-cache-strategy",
}


@dataclass(frozen=True, slots=True)
class Standing:
    """Whether a release reads a flag. None: it cannot be told.

    seen   releases that were looked at and read it
    """

    is_read: bool | None
    seen: tuple[str, ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether any release that was looked at reads it."""
        return self.is_read is not False or bool(self.seen)


def standing(engine: str, name: str, version: Version) -> Standing:
    """What ``version`` of the engine does with the flag ``name`` (canonical)."""
    name = name.partition(".")[0]
    if name in FRONT_END:
        return Standing(True)
    if engine == "trtllm":
        return Standing(True if name in TRTLLM else None if version.first is None else False)
    releases, table = _table(engine)
    pattern = table.get(name, table.get(_ON_FILE.get((engine, name), ""), ""))
    if not pattern:
        return Standing(False)
    seen = tuple(release for release, letter in zip(releases, pattern, strict=True) if letter == "x")
    return Standing(_is_read(releases, pattern, version), seen)


#: Names that are written otherwise in the list of flags.
_ON_FILE = {("vllm", "optimization_level"): "compilation_config"}


def _is_read(releases: tuple[str, ...], pattern: str, version: Version) -> bool | None:
    """By the releases around ``version`` that were looked at; None where they disagree."""
    if version.first is None or version.last is None:
        return None
    points = [Version.read(release).first or () for release in releases]
    before = [letter for point, letter in zip(points, pattern, strict=True) if point <= version.last]
    after = [letter for point, letter in zip(points, pattern, strict=True) if point >= version.first]
    inside = [letter for point, letter in zip(points, pattern, strict=True) if version.first <= point <= version.last]
    around = set(inside) or {*before[-1:], *after[:1]}
    return None if len(around) != 1 else around == {"x"}


def names(engine: str) -> frozenset[str]:
    """Every name that any release that was looked at reads."""
    return (TRTLLM if engine == "trtllm" else frozenset(_table(engine)[1])) | FRONT_END


@functools.cache
def _table(engine: str) -> tuple[tuple[str, ...], dict[str, str]]:
    lines = (_DATA / f"{engine}.txt").read_text(encoding="utf-8").splitlines()
    rows = [line.split() for line in lines if line and not line.startswith("#")]
    releases = tuple(rows[0][1:])
    return releases, dict(rows[1:])
