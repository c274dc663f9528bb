"""`headrace worker`: one process that serves one model from its queues.

Imports no torch and no RQ by itself: they load beside each other once the options are read.
"""

import sys
from typing import Any

import click

from headrace.engine.config import EngineConfig
from headrace.worker import logs, options
from headrace.worker.config import DEFAULT_PORT, WorkerConfig
from headrace.worker.drain import PROFILES
from headrace.worker.loop import LoopSettings
from headrace.worker.options import option
from headrace.worker.signals import leave_at_once

_ENGINE = EngineConfig(model="")
_LOOP = LoopSettings()


@click.command("worker")
@option(
    "--model",
    env="MODEL",
    required=True,
    help="A folder, a .gguf file, a hub id, or smollm2-135m-instruct.",
)
@option(
    "--served-model-name",
    env="SERVED_MODEL_NAME",
    help="What requests call it; default: the last part of --model, lower-case.",
)
@options.redis_url
@option(
    "--queue",
    "queues",
    env="QUEUES",
    multiple=True,
    help="A queue to serve, in order of preference; default: the served name. May be repeated.",
)
@option("--name", env="WORKER_NAME", help="This worker's name; must never be used by two at once.")
@option("--host", env="WORKER_HTTP_HOST", default="127.0.0.1", help="Where /metrics listens.")
@option(
    "--port",
    env="WORKER_HTTP_PORT",
    type=options.PortType(),
    help=f"Port of /metrics, /healthz, /readyz; default {DEFAULT_PORT} or a free one; 0: free.",
)
@option(
    "--max-num-seqs",
    env="MAX_NUM_SEQS",
    type=click.IntRange(1, 2**16),
    default=_ENGINE.max_num_seqs,
    help="Sequences computed at once.",
)
@option(
    "--max-num-batched-tokens",
    env="MAX_NUM_BATCHED_TOKENS",
    type=click.IntRange(1, 2**20),
    default=_ENGINE.max_num_batched_tokens,
    help="Tokens computed in one step.",
)
@option("--max-model-len", env="MAX_MODEL_LEN", type=click.IntRange(2), help="Prompt and answer.")
@option(
    "--kv-cache-memory",
    env="KV_CACHE_MEMORY",
    type=options.BytesType(),
    help="Memory of the KV pool (2G, 500M); default: measured.",
)
@option(
    "--gpu-memory-utilization",
    env="GPU_MEMORY_UTILIZATION",
    type=options.FiniteType(0.05, 1.0),
    default=_ENGINE.gpu_memory_utilization,
    help="Share of a GPU's memory for weights, steps and KV pool; on a CPU share of the free memory"
    " for the KV pool.",
)
@option(
    "--dtype",
    env="DTYPE",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
)
@option(
    "--device",
    env="DEVICE",
    default="auto",
    help="cpu, cuda or cuda:N; auto: a CUDA device if there is one.",
)
@option(
    "--quantization",
    env="QUANTIZATION",
    help="Weights: int8-dynamic, int8, int4-g64, nf4, bf16, ...; default: as they are stored.",
)
@option(
    "--kv-cache-dtype",
    env="KV_CACHE_DTYPE",
    type=click.Choice(["auto", "float", "int8", "fp8"]),
    default=_ENGINE.kv_cache_dtype,
    help="Keys and values: floats, or 8 bits with a scale for each token and head; auto: int8 on a"
    " CPU with --quantization int8-dynamic, else floats.",
)
@option(
    "--block-size",
    env="BLOCK_SIZE",
    type=click.IntRange(1, 2**16),
    default=_ENGINE.block_size,
    help="Tokens of a block of the KV pool; the compiled kernels want a multiple of 16.",
)
@option(
    "--prefix-caching/--no-prefix-caching", env="PREFIX_CACHING", default=True, help="Prefix cache."
)
@option(
    "--deterministic",
    env="DETERMINISTIC",
    is_flag=True,
    help="An answer does not depend on what else is in the batch; slower.",
)
@option("--enforce-eager", env="ENFORCE_EAGER", is_flag=True, help="No CUDA graphs.")
@option(
    "--prefill-attention",
    env="PREFILL_ATTENTION",
    type=click.Choice(["auto", "triton", "sdpa"]),
    default=_ENGINE.prefill_attention,
    help="Whose kernel attends long prompts on a GPU, ours or torch's; auto: measured at start.",
)
@option("--num-threads", env="NUM_THREADS", type=click.IntRange(1, 1024), help="CPU threads.")
@option(
    "--look-ahead",
    env="LOOK_AHEAD",
    type=click.IntRange(0),
    help="Sequences claimed beyond the slots; default: an eighth of them.",
)
@option(
    "--checkpoint-every",
    env="CHECKPOINT_EVERY",
    type=click.IntRange(0),
    default=_LOOP.checkpoint_every,
    help="Output tokens between two checkpoints of a job; 0: only when draining.",
)
@option(
    "--drain-profile",
    env="DRAIN_PROFILE",
    type=click.Choice(sorted(PROFILES)),
    default="on-demand",
    help=", ".join(f"{name}: {seconds:g} s" for name, seconds in PROFILES.items()),
)
@option("--drain-timeout", env="DRAIN_TIMEOUT", type=options.FiniteType(0), help="Seconds instead.")
@option(
    "--spot-notice",
    env="SPOT_NOTICE",
    help="aws, gcp, azure, a URL or a file: polled, and drained (spot) when it gives notice.",
)
@option(
    "--hang-timeout",
    env="HANG_TIMEOUT",
    type=options.FiniteType(1),
    default=600.0,
    help="Seconds after which a step is a hang and its leases lapse.",
)
@option("--lease-seconds", env="LEASE_SECONDS", type=options.FiniteType(1, 86400), default=60.0)
@option("--max-attempts", env="MAX_ATTEMPTS", type=click.IntRange(1), default=3)
@option("--max-crashes", env="MAX_CRASHES", type=click.IntRange(1), default=3)
@option(
    "--connect-timeout",
    env="CONNECT_TIMEOUT",
    type=options.FiniteType(0),
    default=5.0,
    help="Seconds to try a Redis that does not answer at the start.",
)
@option(
    "--exit-with-parent",
    env="EXIT_WITH_PARENT",
    is_flag=True,
    help="End when the process that started this one does.",
)
@option(
    "--deletion-cost",
    env="DELETION_COST",
    is_flag=True,
    help="In a pod: keep its pod-deletion-cost, so that idle pods are removed first.",
)
@options.logging
def worker(**chosen: Any) -> None:
    """Serve one model: claim jobs, run them in one continuous batch, record the results."""
    leave_at_once()
    logs.set_up(chosen["log_level"], chosen["log_format"])
    from headrace.worker.process import WorkerProcess

    status = WorkerProcess(make_config(chosen)).run()
    sys.stderr.flush()
    sys.exit(status)


def make_config(chosen: dict[str, Any]) -> WorkerConfig:
    """The options of the command line as settings."""
    engine = EngineConfig(
        model=chosen["model"],
        served_model_name=chosen["served_model_name"],
        dtype=chosen["dtype"],
        device=chosen["device"],
        quantization=chosen["quantization"],
        kv_cache_dtype=chosen["kv_cache_dtype"],
        max_model_len=chosen["max_model_len"],
        max_num_seqs=chosen["max_num_seqs"],
        max_num_batched_tokens=chosen["max_num_batched_tokens"],
        block_size=chosen["block_size"],
        kv_cache_memory_bytes=chosen["kv_cache_memory"],
        gpu_memory_utilization=chosen["gpu_memory_utilization"],
        enable_prefix_caching=chosen["prefix_caching"],
        deterministic=chosen["deterministic"],
        enforce_eager=chosen["enforce_eager"],
        prefill_attention=chosen["prefill_attention"],
        num_threads=chosen["num_threads"],
    )
    same = (
        "redis_url",
        "queues",
        "name",
        "host",
        "port",
        "drain_profile",
        "drain_timeout",
        "spot_notice",
        "hang_timeout",
        "lease_seconds",
        "max_attempts",
        "max_crashes",
        "connect_timeout",
        "exit_with_parent",
        "deletion_cost",
    )
    return WorkerConfig(
        engine=engine,
        loop=LoopSettings(
            look_ahead=chosen["look_ahead"], checkpoint_every=chosen["checkpoint_every"]
        ),
        **{name: chosen[name] for name in same},
    )


if __name__ == "__main__":
    worker()
