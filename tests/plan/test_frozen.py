"""Frozen weights, LoRA and memory switches: counts are exact, and training less must cost less."""

import re
from dataclasses import replace

import pytest
from test_memory import activations_per_layer

from three_axes.paper.hardware import DEVICES
from three_axes.plan import CLUSTERS, FRAMEWORKS, MODELS, Job, Layout, estimate, plan
from three_axes.plan.cost import step_terms
from three_axes.plan.data_parallel import adapter_share, synchronisation
from three_axes.plan.flags import flags
from three_axes.plan.job import Lora
from three_axes.plan.meeting import close_calls
from three_axes.plan.memory import stage_states
from three_axes.plan.operations import head, layer
from three_axes.plan.page import page
from three_axes.plan.traffic import sent
from three_axes.table import human

MEGATRON, TITAN = FRAMEWORKS["megatron-lm"], FRAMEWORKS["torchtitan"]
JOB = Job(MODELS["llama-3-8b"], CLUSTERS["dgx-h100"], 32, 4096, MEGATRON)
LORA = replace(JOB, lora=Lora(16))


def test_adapters_have_the_parameters_that_peft_prints():
    # r·(in + out) of each of the seven linear layers: PEFT prints 41,943,040 for Llama 3 8B at rank 16.
    assert adapter_share(LORA, Layout()) == 41_943_040
    stages = [adapter_share(LORA, Layout(pp=4), k) for k in range(4)]
    assert stages == [41_943_040 / 4] * 4
    assert adapter_share(JOB, Layout()) == 0


@pytest.mark.parametrize("t", (2, 4, 8))
def test_one_of_an_adapters_matrices_is_whole_on_each_rank(t):
    h, kv, f = 4096, 1024, 14336
    whole = 32 * 16 * (3 * h + h + 2 * h + h)  # first matrix at q, k, v, gate, up; second at o, down
    split = 32 * 16 * (h + 2 * kv + h + 2 * f + f) / t
    assert adapter_share(LORA, Layout(tp=t)) == whole + split
    (sums,) = [op.sends for op in synchronisation(LORA, Layout(tp=t)) if op.name == "gradients of adapters"]
    assert sums.payload == pytest.approx(2 * whole) and sums.calls == 1


@pytest.mark.parametrize("name", ("llama-3-8b", "gpt3-175b", "mixtral-8x7b", "deepseek-v2-lite"))
def test_a_frozen_matrix_has_no_weight_gradient(name):
    job = Job(MODELS[name], CLUSTERS["dgx-h100"], 8, 2048, MEGATRON)
    frozen = replace(job, lora=Lora(8))
    every = lambda j: layer(j, Layout()) + head(j, Layout())
    full, few = ([op for op in every(j) if op.phase == "W" and op.flops] for j in (job, frozen))
    assert full and all(op.name.startswith("adapter of") and op.adapters for op in few)
    assert sum(op.flops for op in few) < 0.02 * sum(op.flops for op in full)
    # Adapters add their FLOPs to forward. Weight gradients of frozen matrices are gone; the rest stays.
    of = lambda j, phase: sum(op.flops for op in layer(j, Layout()) if op.phase == phase)
    assert of(frozen, "F") - of(job, "F") == pytest.approx(sum(op.flops for op in few))
    assert frozen.flops_per_token() < job.flops_per_token()


@pytest.mark.parametrize("framework, passes, kernels", [(MEGATRON, 1, 0), (TITAN, 5, 2)])
def test_the_sum_with_an_adapter_is_a_products_own_or_two_passes(framework, passes, kernels):
    tokens, h, f = 4096, 4096, 14336
    ops = layer(replace(LORA, framework=framework), Layout())
    sums = {op.phase: (op.streamed, op.kernels) for op in ops if op.name == "sum with adapter of gate"}
    assert sums == {"F": (2 * passes * tokens * f, kernels), "I": (2 * passes * tokens * h, kernels)}


@pytest.mark.parametrize("t", (1, 4))
@pytest.mark.parametrize("name", ("llama-3-8b", "mixtral-8x7b"))
def test_four_bits_are_made_two_bytes_for_each_product(name, t):
    """For all matrices of a layer, forward and backward each read 4.127 bits a number and write two bytes."""
    model, lora = MODELS[name], Lora(8, four_bit=True)
    job = Job(model, CLUSTERS["dgx-h100"], 8, 2048, MEGATRON, lora=lora)
    lines = [op for op in layer(job, Layout(tp=t)) if op.name.startswith("dequantise")]
    split, whole = model.attention_params + model.matrices(model.ffn), 0
    if e := model.experts:  # the router and the experts are not cut by tp
        split, whole = model.attention_params, e.count * (model.hidden + model.matrices(e.ffn))
    moved = (lora.weight_bytes + 2) * (split / t + whole)
    for phase in "FI":
        assert sum(op.streamed for op in lines if op.phase == phase) == pytest.approx(moved)


def test_memory_falls_where_less_is_trained():
    layout = Layout(dp=8, zero=1)
    full, lora = stage_states(JOB, layout, 0), stage_states(LORA, layout, 0)
    n, a = JOB.model.params, 41_943_040
    assert lora["weights"] == pytest.approx(2 * n + 2 * a)
    assert lora["gradients"] == pytest.approx(4 * a) and lora["optimizer"] == pytest.approx(12 * a / 8)
    assert full["gradients"] == pytest.approx(4 * n)
    four = stage_states(replace(LORA, lora=Lora(16, four_bit=True)), layout, 0)
    ends = 2 * JOB.model.vocab * JOB.model.hidden + JOB.model.hidden  # embedding, head and last norm
    bits = 8 * (four["weights"] - 2 * a - 2 * ends) / (n - ends)
    assert bits == pytest.approx(4.127, abs=1e-3)  # Dettmers et al. 2023, section 3: 4 and 0.127
    kept = lambda job: sum(activations_per_layer(job, Layout()).values())
    assert kept(LORA) - kept(JOB) == 2 * 4096 * 16 * 7  # between the two matrices of the seven adapters


def test_time_falls_and_no_figure_of_full_training_moves():
    graph = MEGATRON.but(launch_seconds=0.0)  # else adapters' small kernels wait for the host
    made = lambda job, layout: step_terms(replace(job, framework=graph), layout)
    terms = lambda job, layout: {k: float(v) for k, v in made(job, layout).items()}
    for layout in (Layout(dp=8, zero=3), Layout(tp=8), Layout(dp=2, tp=2, pp=2, zero=1)):
        full, lora = terms(JOB, layout), terms(LORA, layout)
        assert sum(lora.values()) < sum(full.values()) and lora["optimizer"] < 0.02 * full["optimizer"]
        assert lora["matrices"] > full["matrices"] * 2 / 3
    # FSDP gathers frozen weights too, twice a microbatch, but reduces only the adapters' gradients. So it
    # sends 4 of 4 + 2 bytes.
    dp = lambda job: sent(job, Layout(dp=8, zero=3))["dp"]
    narrow = replace(JOB, framework=MEGATRON.but(gradient_bytes=2))
    assert dp(LORA) == pytest.approx(2 / 3 * dp(narrow), rel=0.03)
    assert sent(replace(LORA, model=MODELS["mixtral-8x7b"]), Layout(dp=8))["edp"] == 0  # experts stay frozen


def test_states_of_eight_bits_and_on_the_host():
    states = lambda **changed: stage_states(replace(JOB, framework=MEGATRON.but(**changed)), Layout(), 0)
    n = JOB.model.params
    assert states(eight_bit=True)["optimizer"] == pytest.approx((4 + 2 * (1 + 4 / 256)) * n)
    assert states(offload=True)["optimizer"] == 0
    host = replace(JOB, framework=MEGATRON.but(offload=True))
    # A parameter moves 4 + 24 + 2 bytes through the host's memory and 4 + 2 over the link, at about 0.9 of
    # the printed speeds.
    slow, fast = (estimate(j, Layout()).time["optimizer"] for j in (host, JOB))
    assert 20 < slow / fast < 100


def test_shards_are_replicated():
    job = replace(JOB, framework=TITAN)
    held = lambda shard: stage_states(job, Layout(dp=16, zero=3, shard=shard), 0)["weights"]
    assert held(8) == 2 * held(0) and held(16) == held(0)
    bytes_ = lambda shard: sent(job, Layout(dp=16, zero=3, shard=shard))
    assert sum(bytes_(16).values()) == pytest.approx(bytes_(0)["dp"])
    hybrid, n, m = bytes_(8), job.model.params, 2
    gathered = (2 * m * 2 * n) * 7 / 8  # about: embedding and head are gathered only once a microbatch
    assert hybrid["shard"] == pytest.approx(gathered + 4 * n * m * 7 / 8, rel=0.1)
    assert hybrid["replicate"] == pytest.approx(2 * 1 / 2 * 4 * n / 8 * m)
    # With a shard inside a node, weights no longer leave the node.
    assert Layout(dp=16, zero=3, shard=8).reach("shard", 8) == (8, 1)
    assert Layout(dp=16, zero=3, shard=8).reach("replicate", 8) == (1, 2)
    assert Layout(dp=16, zero=3, shard=2).reach("replicate", 8) == (4, 2)
    rows = plan(job, gpus=32, shard=8).ranked
    assert "ZeRO-3 over 8" in " ".join(str(row.layout) for row in rows)
    with pytest.raises(ValueError, match="shares out nothing without ZeRO"):
        job.check(Layout(dp=8, zero=0, shard=4))


QUEUE, EACH = "CUDA_DEVICE_MAX_CONNECTIONS=1", "sync_each_batch=True"
FSDP = replace(JOB, framework=TITAN)
LATE = replace(JOB, framework=FRAMEWORKS["transformers"])
EXPERTS = Job(MODELS["mixtral-8x7b"], CLUSTERS["dgx-h100"], 32, 4096, MEGATRON, "fp8")
BIG = Job(MODELS["llama-3-405b"], CLUSTERS["dgx-h100"], 32, 4096, FRAMEWORKS["megatron-bridge"])
B200 = replace(JOB, cluster=CLUSTERS["dgx-b200"], precision="nvfp4")
HYBRID = Layout(dp=8, tp=2, cp=2, zero=3, shard=8, recompute="full")
PIPED = dict(dp=4, tp=2, pp=4)


@pytest.mark.parametrize(
    "framework, job, layout, printed, not_printed",
    [
        (
            "megatron-lm",
            replace(JOB, framework=MEGATRON.but(eight_bit=True, offload=True, gradient_bytes=2)),
            Layout(**PIPED, cp=2, interleave=2, schedule="interleaved", zero=1, recompute="full"),
            """--tensor-model-parallel-size 2; --pipeline-model-parallel-size 4; --cp-comm-type p2p;
            --num-virtual-stages-per-pipeline-rank 2; --sequence-parallel; --grad-reduce-in-bf16;
            --use-distributed-optimizer; --optimizer-cpu-offload; --exp-avg-sq-dtype fp8;
            --recompute-granularity full; CUDA_DEVICE_MAX_CONNECTIONS=1""",
            "--tp-comm-overlap",
        ),
        (
            "megatron-lm",
            EXPERTS,
            Layout(dp=8, ep=4, zero=1, recompute="modules"),
            """--expert-model-parallel-size 4; --moe-token-dispatcher-type alltoall; --fp8-recipe delayed;
            --recompute-granularity selective; --recompute-modules layernorm moe_act""",
            QUEUE,
        ),
        (
            "megatron-lm",
            BIG,
            Layout(dp=2, tp=8, pp=16, zero=1, order=("dp", "pp", "tp")),
            "--tp-comm-overlap; --account-for-embedding-in-pipeline-split; --use-tp-pp-dp-mapping",
            "--use-megatron-fsdp",
        ),
        (
            "megatron-lm",
            B200,
            Layout(dp=4, tp=2, zero=3, shard=2),
            """--num-distributed-optimizer-instances 2; --use-megatron-fsdp; --fp4-format e2m1;
            --data-parallel-sharding-strategy optim_grads_params; --megatron-fsdp-main-grads-dtype fp32""",
            QUEUE,  # Blackwell needs none
        ),
        (
            "torchtitan",
            replace(FSDP, framework=TITAN.but(offload=True)),
            Layout(**PIPED, microbatch=2, zero=3, sequence_parallel=False, recompute="per-op"),
            """num_tokens_per_microbatch_per_dp_rank 8192; num_tokens_per_train_step 131072;
            num_pp_microbatches 4; pipeline_parallel_layers_per_stage 8; --training.enable_cpu_offload;
            --parallelism.no-enable-sequence-parallel; activation-checkpoint:selective; --module and""",
            "activation-checkpoint:full",
        ),
        (
            "torchtitan",
            FSDP,
            HYBRID,
            "replicate_degree 2; shard_degree 4; tensor_parallel_degree 2; context_parallel_degree 2",
            "pipeline",
        ),
        (
            "accelerate",
            FSDP,
            HYBRID,
            f"""replicate_size: 2; dp_shard_size: 4; tp_size: 2; cp_size: 2; num_processes: 32; tp_size=2;
            fsdp_activation_checkpointing: true; gradient_accumulation_steps=4; {EACH}""",
            "LoRA",
        ),
        ("accelerate", replace(LATE, lora=Lora(8, True)), Layout(dp=8, zero=3), "rank 8; 4 bits", EACH),
    ],
)
def test_flags_say_the_layout(framework, job, layout, printed, not_printed):
    text = flags(framework, job, layout)
    for phrase in printed.split(";"):
        assert re.search(re.escape(phrase.strip()) + r"(?!\w)", text), phrase
    assert not_printed not in text


def test_accelerate_reads_its_file(tmp_path):
    from accelerate.commands.config.config_args import load_config_from_file

    (tmp_path / "job.yaml").write_text(flags("accelerate", FSDP, Layout(dp=8, tp=2, zero=3)).split("\n\n")[0])
    read = load_config_from_file(str(tmp_path / "job.yaml"))
    assert (read.num_processes, read.num_machines, read.main_process_port) == (16, 2, 29500)
    assert read.parallelism_config["parallelism_config_tp_size"] == 2


def test_whole_gradients_between_microbatches_get_a_warning():
    said = "\n".join(estimate(LATE, Layout(dp=8, zero=3)).warnings())
    assert f"{human(2 * JOB.model.params)} of gradients" in said and "--with sync-each-batch" in said
    each = replace(LATE, framework=LATE.framework.but(reduces_each=True))
    assert "sync-each-batch" not in "\n".join(estimate(each, Layout(dp=8, zero=3)).warnings())


@pytest.mark.parametrize(
    "framework, changed, layout, sentence",
    [
        ("megatron-lm", {"lora": Lora(8)}, Layout(dp=8), "Megatron-LM has no flag for LoRA"),
        ("megatron-lm", {}, Layout(pp=4, schedule="ZB-H1"), "the schedule ZB-H1"),
        ("megatron-lm", {}, Layout(dp=8, recompute="per-op"), "per-op recompute"),
        ("torchtitan", {}, Layout(dp=8, zero=1), "ZeRO-1"),
        ("torchtitan", {"precision": "fp8"}, Layout(dp=8, zero=3), "fp8"),
        ("accelerate", {}, Layout(dp=8, zero=1), "ZeRO-1"),
        ("accelerate", {}, Layout(dp=2, pp=4), "a pipeline"),
        ("deepspeed", {}, Layout(dp=8), "flags are known of megatron"),
        ("megatron-lm", {}, Layout(dp=8, tp=3), "does not divide"),
    ],
)
def test_what_a_framework_cannot_do_is_refused_by_name(framework, changed, layout, sentence):
    with pytest.raises(ValueError, match=sentence):
        flags(framework, replace(JOB, **changed), layout)


def test_four_bits_are_cut_along_no_axis():
    four = replace(JOB, lora=Lora(16, four_bit=True))
    with pytest.raises(ValueError, match="data parallelism alone"):
        four.check(Layout(dp=4, tp=2))
    assert {c.layout.ranks == c.layout.dp for c in plan(four, gpus=8).ranked} == {True}


def test_a_recompute_policy_that_is_the_only_one_is_tried():
    best = plan(replace(JOB, framework=MEGATRON.but(recomputes=("selective",))), gpus=8).best
    assert best.layout.recompute == "selective" and best.seconds == plan(JOB, gpus=8).best.seconds


def test_a_gpu_without_bf16_gets_a_warning():
    volta = replace(CLUSTERS["dgx-h100"], device=DEVICES["v100-32gb"])
    small = replace(JOB, model=MODELS["llama-3.2-1b"], cluster=volta)
    assert any("no bf16 on v100-32gb" in said for said in estimate(small, Layout(dp=8)).warnings())


def test_remedies_are_tried():
    """A remedy that the planner offers must fit."""
    seventy = replace(JOB, model=MODELS["llama-3-70b"])
    none = plan(seventy, gpus=8)
    with pytest.raises(ValueError, match="does not fit 8 .*it fits from 32 GPUs on; it fits with LoRA"):
        none.best  # noqa: B018
    assert not none.ranked and len(none.remedies) == 3
    assert plan(seventy, gpus=32).ranked and not plan(seventy, gpus=16).ranked
    assert plan(replace(seventy, lora=Lora(16)), gpus=8).ranked
    assert plan(replace(seventy, framework=MEGATRON.but(offload=True)), gpus=8).ranked
    # Whole gradients of a 70B take 141 GB; those of one microbatch, without a sum, need its activations.
    late = replace(seventy, global_batch=512, framework=FRAMEWORKS["transformers"])
    remedy = "with gradients reduced in each microbatch (--with sync-each-batch)"
    assert not plan(late, gpus=64).ranked and plan(late, gpus=64).remedies[0] == remedy
    assert plan(replace(late, framework=late.framework.but(reduces_each=True)), gpus=64).ranked
    only = replace(JOB, global_batch=8, seq_len=32768, framework=MEGATRON.but(recomputes=("none",)))
    tight = plan(only, gpus=4, cp=1)
    assert not tight.ranked and tight.remedies[0] == "with recompute full"
    assert plan(replace(only, framework=MEGATRON), gpus=4, cp=1).ranked


def test_the_page_is_complete_in_itself():
    of = plan(replace(JOB, lora=Lora(16)), gpus=8)
    text = page(of, 1e9)
    assert "http" not in text and "<script" not in text and "prefers-color-scheme: dark" in text
    assert "size: A4" in text and "LoRA 16" in text and "GPU-hours" in text
    assert text.count("<h2>") == 7 and "the job stops every" in text and str(of.best.layout) in text
    widths = [float(w) for w in re.findall(r"width:([\d.]+)%\"", text)]
    assert sum(widths) == pytest.approx(100, abs=0.1)
    seventy = replace(JOB, model=MODELS["llama-3-70b"], global_batch=128, seq_len=8192)
    near = close_calls(plan(seventy, gpus=64))
    assert near.startswith("Less than 10% behind, which is a tie") and "DP 1 · TP 4 · PP 8 · CP 2" in near
    assert close_calls(plan(replace(JOB, lora=Lora(16)), gpus=1)) == ""
    with pytest.raises(ValueError, match="does not fit"):
        page(plan(replace(JOB, model=MODELS["llama-3-405b"]), gpus=8))
