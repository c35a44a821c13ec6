"""The answer of ``/server_info``: the settings that a router may want to know, in vLLM's form."""

from typing import Any

from extproc.sim.config import SimConfig
from extproc.sim.prefix_cache import BLOCK_TOKENS
from extproc.sim.served_models import ServedModels

VERSION = "0.32.0+sim"
"""The vLLM release whose surface is imitated."""


def describe(
    config: SimConfig,
    models: ServedModels,
    *,
    as_json: bool,
    max_model_len: int,
    kv_blocks: int,
) -> dict[str, Any]:
    """Return the document: the configuration as text, as vLLM shows it by default, or as JSON.

    Args:
        config: settings of the worker.
        models: its models.
        as_json: whether ``config_format=json`` was asked for.
        max_model_len: longest prompt and answer together, in tokens.
        kv_blocks: KV blocks of one rank.

    """
    served = list(models.bases)
    sections = {
        "model_config": {
            "model": served[0],
            "served_model_name": served,
            "max_model_len": max_model_len,
        },
        "cache_config": {"block_size": BLOCK_TOKENS, "num_gpu_blocks": kv_blocks},
        "parallel_config": {
            "data_parallel_size": config.data_parallel_size,
            "data_parallel_rank": config.data_parallel_start_rank,
        },
        "scheduler_config": {
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
        },
    }
    text = (
        f"model={served[0]!r}, max_seq_len={max_model_len}, tensor_parallel_size=1, "
        f"pipeline_parallel_size=1, data_parallel_size={config.data_parallel_size}, "
        f"served_model_name={served}"
    )
    return {
        "vllm_config": sections if as_json else text,
        "vllm_env": {},
        "system_env": {},
        "version": VERSION,
    }
