"""A layout as a framework's own flags, or as its configuration file.

Every name was read in the source that `SOURCES` gives, and the text ends with that source. What a framework
cannot do, or not by a flag, is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .job import Job
from .layout import ORDER, Layout

# framework -> repository, commit, date and files in which its names were read
SOURCES = {
    "megatron-lm": "NVIDIA/Megatron-LM at d98e8a6 (22 August 2026), megatron/training/arguments.py",
    "torchtitan": "pytorch/torchtitan at b5bcd76 (21 August 2026), config/configs.py, trainer.py,"
    " distributed/activation_checkpoint.py",
    "accelerate": "huggingface/accelerate at 16cb6eb (24 July 2026), config_args.py, parallelism_config.py",
}
# Our name -> Megatron-LM's --fp8-recipe, its --cp-comm-type, and PyTorch's name of a schedule.
FP8 = {"fp8": "delayed", "fp8-current": "tensorwise", "fp8-blockwise": "blockwise", "mxfp8": "mxfp8"}
CONTEXT = {"ring": "p2p", "gather": "allgather", "heads": "a2a"}
SCHEDULES = {"1F1B": "1F1B", "interleaved": "Interleaved1F1B", "ZB-V": "ZBVZeroBubble"}


def flags(framework: str, job: Job, layout: Layout) -> str:
    """The layout as a framework's flags. Raises ValueError for a framework that is not in `SOURCES`, and for
    what the framework cannot do.
    """
    if framework not in SOURCES:
        raise ValueError(f"flags are known of {', '.join(SOURCES)}, not of {framework!r}")
    job.check(layout)
    only_megatron = {
        f"recompute of {layout.recomputed} layers": layout.recomputed,
        "recompute of modules": layout.recompute == "modules",
    }
    _refuse(framework, only_megatron if framework != "megatron-lm" else {})
    makers = {"megatron-lm": _megatron, "torchtitan": _torchtitan, "accelerate": _accelerate}
    return f"{makers[framework](job, layout)}\n\nas read in {SOURCES[framework]}"


def _refuse(framework: str, unable: Mapping[str, object]) -> None:
    """Raises ValueError for the first key whose value is true."""
    for what, asked in unable.items():
        if asked:
            raise ValueError(f"{framework} has no flag for {what}")


def _megatron(job: Job, layout: Layout) -> str:
    f, p, layers = job.framework, layout.pp, job.model.layers
    stages, split = p * layout.chunks, layout.tp > 1 and layout.sequence_parallel
    ends = layers % stages != 0 and (layers + 2) % stages == 0  # embedding and head count as layers
    uneven = layers % stages != 0 and not ends
    _refuse(
        "Megatron-LM",
        {
            "LoRA (Megatron Bridge has it)": job.lora is not None,
            "per-op recompute": layout.recompute == "per-op",
            f"{layers} layers on {stages} stages, but as a layout written out": uneven,
            f"the schedule {layout.schedule}": layout.schedule not in ("1F1B", "interleaved"),
            f"the order {' '.join(layout.order)}": layout.order not in (ORDER, ("dp", "pp", "tp")),
        },
    )
    given = {
        "tensor-model-parallel-size": layout.tp,
        "pipeline-model-parallel-size": p,
        "context-parallel-size": layout.cp,
        "micro-batch-size": layout.microbatch,
        "global-batch-size": job.global_batch,
        "seq-length": job.seq_len,
        "bf16": True,
        "sequence-parallel": split,
        "tp-comm-overlap": split and "tensor parallel" in f.hides,
        "num-virtual-stages-per-pipeline-rank": layout.interleave if layout.interleave > 1 else False,
        "account-for-embedding-in-pipeline-split": ends,
        "account-for-loss-in-pipeline-split": ends,
        "use-tp-pp-dp-mapping": layout.order == ("dp", "pp", "tp"),
        "cp-comm-type": CONTEXT[f.sends.context] if layout.cp > 1 else False,
        "grad-reduce-in-bf16": f.holds.gradient_bytes == 2,
        "overlap-grad-reduce": "gradients" in f.hides,
        "use-distributed-optimizer": layout.zero >= 1,
        "overlap-param-gather": layout.zero >= 1 and "updated weights" in f.hides,
        "num-distributed-optimizer-instances": layout.replicas // layout.shard if layout.shard else False,
        "optimizer-cpu-offload": f.holds.offload,
        "use-precision-aware-optimizer": f.holds.eight_bit or f.holds.offload,
        "exp-avg-dtype": "fp8" if f.holds.eight_bit else False,
        "exp-avg-sq-dtype": "fp8" if f.holds.eight_bit else False,
    }
    if layout.zero >= 2:
        sharded = {2: "optim_grads", 3: "optim_grads_params"}[layout.zero]
        given |= {
            "use-megatron-fsdp": True,
            "data-parallel-sharding-strategy": sharded,
            # Otherwise its FSDP sums and sends gradients in the weights' type.
            "megatron-fsdp-main-grads-dtype": "fp32" if f.holds.gradient_bytes == 4 else False,
            "ckpt-format": "fsdp_dtensor",
        }
    if job.model.experts:
        given |= {
            "expert-model-parallel-size": layout.ep,
            "expert-tensor-parallel-size": layout.etp,
            "moe-token-dispatcher-type": "flex" if f.sends.once_a_node else "alltoall",
            "moe-grouped-gemm": f.runs.grouped,
        }
    if layout.recompute == "full":
        some = layout.recomputed // layout.chunks  # Megatron-LM's flag has the layers of a chunk
        method = {"recompute-method": "block" if some else "uniform", "recompute-num-layers": some or 1}
        given |= {"recompute-granularity": "full", **method}
    elif layout.recompute != "none":
        given |= {"recompute-granularity": "selective"}
    if layout.recompute == "modules":
        modules = {"layernorm": True, "moe_act": job.model.experts, "mla_up_proj": job.model.latent}
        given |= {"recompute-modules": " ".join(module for module, has in modules.items() if has)}
    if job.precision in FP8:
        given |= {"fp8-format": "hybrid", "fp8-recipe": FP8[job.precision]}
    elif job.precision == "nvfp4":
        given |= {"fp4-format": "e2m1"}
    lines = [f"--{name}" + ("" if value is True else f" {value}") for name, value in given.items() if value]
    # One queue to the GPU, so that hidden communication starts first; Megatron-LM's FSDP needs several.
    one_queue = layout.tp * layout.cp > 1 and layout.zero < 2 and not job.cluster.device.fp4
    environment = "\n\nin the environment: CUDA_DEVICE_MAX_CONNECTIONS=1" * one_queue
    return " \\\n".join(lines) + environment


def _torchtitan(job: Job, layout: Layout) -> str:
    f, p, layers = job.framework, layout.pp, job.model.layers
    stages = p * layout.chunks
    less = int(layers % stages != 0)  # the first and last stage hold one layer less
    _refuse(
        "torchtitan's command line",
        {
            "LoRA (a model's configuration has it)": job.lora is not None,
            f"{job.precision} (a model's configuration has it)": job.precision != "bf16",
            "8-bit Adam": f.holds.eight_bit,
            f"etp {layout.etp}": layout.etp > 1,
            f"{layers} layers on {stages} stages": (layers + 2 * less) % stages != 0,
            "selective recompute as Megatron-LM means it": layout.recompute == "selective",
            f"ZeRO-{layout.zero}": layout.zero in (1, 2),
            f"the schedule {layout.schedule}": layout.schedule not in SCHEDULES,
            f"the order {' '.join(layout.order)}": layout.order != ORDER,
        },
    )
    # torchtitan shards weights over cp too, but its degrees of data parallelism exclude cp.
    shard = max(1, (layout.shard or layout.replicas) // layout.cp) if layout.zero == 3 else 1
    recompute = {"none": "none", "per-op": "selective", "full": "full"}[layout.recompute]
    given = {
        "training.num_tokens_per_microbatch_per_dp_rank": layout.microbatch * job.seq_len,
        "training.num_tokens_per_train_step": job.global_batch * job.seq_len,
        "training.max_context_length": job.seq_len,
        "parallelism.data_parallel_replicate_degree": layout.dp // shard,
        "parallelism.data_parallel_shard_degree": shard,
        "parallelism.tensor_parallel_degree": layout.tp,
        "parallelism.context_parallel_degree": layout.cp,
        "parallelism.expert_parallel_degree": layout.ep,
    }
    if p > 1:
        given |= {
            "parallelism.pipeline_parallel_degree": p,
            "parallelism.pipeline_parallel_schedule": SCHEDULES[layout.schedule],
            # All microbatches of a step, so that none are accumulated outside the pipeline.
            "parallelism.num_pp_microbatches": job.microbatches(layout),
            "parallelism.pipeline_parallel_layers_per_stage": (layers + 2 * less) // stages,
            "parallelism.pipeline_parallel_first_stage_less_layers": less,
            "parallelism.pipeline_parallel_last_stage_less_layers": less,
        }
    switches = ["--training.enable_cpu_offload"] * f.holds.offload
    if layout.tp > 1 and not layout.sequence_parallel:
        switches.append("--parallelism.no-enable-sequence-parallel")
    switches.append(f"activation-checkpoint:{recompute}")  # a subcommand of its parser, after all flags
    behind = "\n\nbehind --module and --config, which name the model"
    return " \\\n".join([*(f"--{name} {value}" for name, value in given.items()), *switches]) + behind


def _accelerate(job: Job, layout: Layout) -> str:
    f = job.framework
    _refuse(
        "Accelerate",
        {
            "a pipeline in training": layout.pp > 1,
            "experts' parallelism": layout.ep * layout.etp > 1,
            "ZeRO-1 (its FSDP shares out gradients too, as ZeRO-2 does)": layout.zero == 1,
            "tensor parallelism without FSDP": layout.tp * layout.cp > 1 and not layout.zero,
            "8-bit Adam, which the script chooses (bitsandbytes),": f.holds.eight_bit,
            f"{job.precision}, but as fp8": job.precision not in ("bf16", "fp8"),
        },
    )
    shard = max(1, (layout.shard or layout.replicas) // layout.cp) if layout.zero else 1
    true = lambda yes: "true" if yes else "false"
    lines = ["compute_environment: LOCAL_MACHINE"]
    if layout.zero:
        lines += [
            "distributed_type: FSDP",
            "fsdp_config:",
            "  fsdp_version: 2",
            "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
            f"  fsdp_reshard_after_forward: {true(layout.zero == 3)}",
            f"  fsdp_activation_checkpointing: {true(layout.recompute != 'none')}",
            f"  fsdp_offload_params: {true(f.holds.offload)}",
            "  fsdp_state_dict_type: SHARDED_STATE_DICT",
        ]
    else:
        lines += [f"distributed_type: {'MULTI_GPU' if layout.ranks > 1 else 'NO'}"]
    lines += [f"mixed_precision: {job.precision}"]
    machines = -(-layout.ranks // job.cluster.gpus_per_node)
    lines += [f"num_machines: {machines}"]
    if machines > 1:
        lines += ["machine_rank: 0", "main_process_ip: 10.0.0.1", "main_process_port: 29500"]
    lines += [f"num_processes: {layout.ranks}"]
    if layout.zero and layout.ranks > 1:
        sizes = dict(dp_replicate=layout.dp // shard, dp_shard=shard, tp=layout.tp, cp=layout.cp)
        lines += ["parallelism_config:"]
        lines += [f"  parallelism_config_{name}_size: {size}" for name, size in sizes.items()]
    accumulated = f"gradient_accumulation_steps={job.microbatches(layout)}"
    steps = [f"per_device_train_batch_size={layout.microbatch}, {accumulated}"]
    if f.sends.reduces_each and layout.zero >= 2 and layout.ranks > 1 and job.microbatches(layout) > 1:
        steps.append(
            "GradientAccumulationPlugin(sync_each_batch=True) with that number, for what is planned reduces"
            " gradients in each microbatch, and FSDP2 would hold them whole until the last one"
        )
    if machines > 1:
        steps.append("on each machine its machine_rank, and the first one's address")
    if layout.tp > 1:
        steps.append(f"the model loaded with DistributedConfig(tp_size={layout.tp}) (transformers)")
    return "\n".join(lines) + _beside(job, layout, steps, checkpoints=not layout.zero)


def _beside(job: Job, layout: Layout, steps: Sequence[str] = (), checkpoints: bool = True) -> str:
    """What the user's script must do, because Accelerate's file cannot express it. steps: a part of it."""
    lines = list(steps)
    if checkpoints and layout.recompute != "none":
        lines.append("gradient checkpointing of each layer, in the model")
    if job.lora:
        four = ", its weights loaded in 4 bits" * job.lora.four_bit
        lines.append(
            f"LoRA of rank {job.lora.rank} on the linear layers of attention and feed-forward (PEFT){four}"
        )
    return "\n\nin the script: " + "; ".join(lines) if lines else ""
