"""The planner's command line: its options and its output, and its JSON, which is as the manual says."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from three_axes.__main__ import main, parser
from three_axes.paper.axes import AXES
from three_axes.plan import CLUSTERS, MODELS, Job, Layout, estimate
from three_axes.plan.frameworks import find_framework

ROOT = Path(__file__).parents[2]
MANUAL = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
LARGE = "plan llama-3-70b --gpus 64 --batch 128 --seq 8192"
PLAN = "plan llama-3-8b --gpus 8 --cluster dgx-h100 --framework megatron-lm"


def test_the_command_line(output_of):
    out = output_of(f"{LARGE} --cluster dgx-h100")
    assert "what would change the winner" in out and "best: DP" in out and "how" not in out
    assert max(map(len, out.splitlines())) < 120  # longer lines, the formulas, need --explain
    assert "ZB-V" in output_of(f"{LARGE} --schedule 1f1b zb-v --tp 8")
    chosen = output_of("plan llama-3-70b --gpus 64 --tp 8 --pp 2 --zero 1 --recompute none --why 4,8,2")
    assert "DP 4 · TP 8 · PP 2: the fastest" in chosen
    asked, words = re.search(r"^--why (\S+) says why not (DP.*\d)[;.]", out, re.M).groups()
    assert f"{words}: " in output_of(f"{LARGE} --cluster dgx-h100 --why {asked}")
    assert "--why" not in output_of("plan toy --gpus 1")
    assert "pipeline that interleaved needs" in output_of("plan toy --gpus 1 --schedule interleaved", rc=2)


def test_an_estimate_has_seconds_memory_bytes_and_the_bubble(output_of):
    sizes = "estimate llama-3-70b --tp 8 --pp 2 --dp 4 --zero 1 --batch 128 --seq 8192"
    out = output_of(sizes)
    assert "optimizer" in out and "stage  weights" in out and "sent by each GPU" in out
    assert "gemm_efficiency" not in out and "gemm_efficiency" in output_of(f"{sizes} --explain")
    made = json.loads(output_of(f"{sizes} --json"))
    assert made["bubble"] == pytest.approx(made["time"]["bubble"] / made["step_seconds"])
    stages = [sum(stage.values()) for stage in made["memory_by_stage"]]
    assert max(stages) == pytest.approx(made["memory_bytes"])
    sent = json.loads(output_of("estimate llama-3-8b --dp 8 --batch 64 --json"))["bytes"]["first"]
    assert sent["dp"] == pytest.approx(2 * 7 / 8 * 2 * MODELS["llama-3-8b"].params) and sent["tp"] == 0
    stages = json.loads(output_of("estimate llama-3-8b --pp 4 --batch 64 --json"))["bytes"]
    assert stages["middle"]["pp"] == 2 * stages["first"]["pp"] == 2 * stages["last"]["pp"]


def test_every_axis_is_explained():
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    for axis in AXES:
        assert re.search(rf"^\| {axis.name.upper()}\b", glossary, re.M), axis.name
        assert f"`--{axis.name}`" in MANUAL, axis.name


def options_of(command: str) -> set[str]:
    """The names of all options of a command and of its subcommands."""
    top = parser(command)
    found, waiting = set(), [action.choices[command] for action in top._subparsers._group_actions]
    while waiting:
        one = waiting.pop()
        found |= {word for action in one._actions for word in action.option_strings if word[:2] == "--"}
        if one._subparsers:
            waiting += [p for action in one._subparsers._group_actions for p in action.choices.values()]
    return found


def test_options_are_few():
    """There are at most 50 option names: a new option replaces an old one."""
    kept = ("lab", "doctor", "class", "plan", "estimate", "count", "verify", "explain")
    names = {command: options_of(command) for command in kept}
    assert all(len(of) <= 26 for of in names.values())
    assert len(set().union(*names.values())) <= 50


def test_the_json_of_a_plan_gives_the_same_estimate_again(output_of):
    printed = json.loads(output_of(f"{LARGE} --framework megatron-bridge --json"))
    assert printed["inputs"]["framework"] == "megatron-bridge" and printed["inputs"]["gradient_bytes"] == 2
    first = printed["ranked"][0]
    assert first["step_seconds"] == pytest.approx(printed["best"]["step_seconds"])
    assert first["layout"] == printed["best"]["layout"] and first["layout"]["order"] == ["pp", "dp", "tp"]
    assert printed["flips"][0]["winner"]["dp"] and printed["refused"][0]["reason"]
    rebuilt = Layout(**first["layout"] | {"order": tuple(first["layout"]["order"])})
    job = Job(MODELS["llama-3-70b"], CLUSTERS["dgx-h100"], 128, 8192, find_framework("megatron-bridge"))
    assert estimate(job, rebuilt).step_seconds == pytest.approx(first["step_seconds"])


def test_a_terminal_without_bars_or_with_a_closed_pipe():
    command = [sys.executable, "-m", "three_axes", "estimate", "llama-3-8b", "--dp", "8", "--zero", "3"]
    environ = os.environ | {"PYTHONIOENCODING": "ascii"}
    how = dict(capture_output=True, text=True, timeout=60)
    done = subprocess.run(command, env=environ, **how)
    assert done.returncode == 0 and "s a step" in done.stdout and not done.stderr
    first = subprocess.run(f"{shlex.join(command)} | head -1", shell=True, **how)
    assert first.stdout and not first.stderr
    if os.path.exists("/dev/full"):
        with open("/dev/full", "w") as full:
            refused = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
        assert refused.returncode == 1 and refused.stderr == "cannot print: No space left on device\n"


@pytest.mark.parametrize(
    "given, batch",
    [
        ("--batch 4M --seq 8192", 512),  # 4·1024²: 8,192 does not divide 4,000,000
        ("--batch 4m --seq 4000", 1000),
        ("--batch 256k --seq 4096", 64),
        ("--batch 64", 64),
        ("", 128),
    ],
)
def test_tokens_in_place_of_sequences(output_of, given, batch):
    printed = json.loads(output_of(f"estimate llama-3-8b --dp 2 {given} --json"))
    assert printed["inputs"]["global_batch"] == batch


@pytest.mark.parametrize(
    "command, sentence",
    [
        (f"{PLAN} --batch 5k --seq 4096", "no whole number of sequences of 4,096; take --batch 1"),
        (f"{PLAN} --batch many", "'many' is no number of tokens"),
        (f"{PLAN} --batch=-4M", "'-4M' is no number of tokens"),
        (f"{PLAN} --batch 1.5", "--batch is a number of sequences, 128, or of tokens, 4M; not '1.5'"),
        (f"{PLAN} --train-tokens 15Q", "'15Q' is no number of tokens"),
        (f"{PLAN} --lora 0", "rank of LoRA must be a whole number of at least 1"),
        (f"{PLAN} --with 4-bit", "4-bit weights are frozen ones: give --lora too"),
        (
            f"{PLAN} --with sync-each-batch --framework torchtitan",
            "is a switch of transformers, and --framework is torchtitan",
        ),
        ("estimate llama-3-8b --shard -2", "shard must be a whole number"),
        (f"{PLAN} --report /nowhere/at/all.html", "cannot write /nowhere/at/all.html: No such file"),
        (f"{PLAN} --lora 16 --flags megatron-lm", "no flag for LoRA"),
        ("estimate llama-3-8b --dp 8 --zero 3 --shard 3 --batch 8", "shard 3 does not divide the 8 replicas"),
        ("plan llama-3-70b --gpus 8", "it fits with LoRA (--lora 16)"),
        ("plan llama-3-70b --gpus 8 --cluster dgx-h1000", "the nearest is 'dgx-h100'"),
    ],
)
def test_a_wrong_command_is_refused_in_one_sentence(output_of, command, sentence):
    err = output_of(command, rc=2)
    assert sentence in err and err.count("\n") == 1 and "Traceback" not in err


def test_hours_flags_and_a_page(output_of, tmp_path):
    path = tmp_path / "page.html"
    out = output_of(
        f"{PLAN} --seq 4096 --train-tokens 1T --flags megatron-lm --report {shlex.quote(str(path))}"
    )
    speed = float(re.search(r"step, ([\d,]+) tokens/s/GPU", out)[1].replace(",", ""))
    hours = float(re.search(r"take ([\d,]+) GPU-hours", out)[1].replace(",", ""))
    assert hours == pytest.approx(1e12 / speed / 3600, rel=1e-3)
    trains = float(re.search(r"([\d.]+)% of the time trains", out)[1]) / 100
    all_of_it = float(re.search(r"checkpoints they take ([\d,]+)", out)[1].replace(",", ""))
    assert trains < 1 and all_of_it == pytest.approx(hours / trains, rel=1e-3)
    assert "--tensor-model-parallel-size" in out and path.read_text(encoding="utf-8").startswith("<!doctype")


def test_sizes_after_why_are_at_least_1(capsys):
    with pytest.raises(SystemExit):
        main(f"{PLAN} --why 0,1,1".split())
    assert "'0,1,1' is not DP,TP,PP, each at least 1" in capsys.readouterr().err


def test_parameters_are_printed_and_with_experts_those_that_a_token_uses(output_of):
    mixtral = "mixtral-8x7b: 46,702,792,704 parameters, 12,879,925,248 of them active for a token"
    for command in ("plan mixtral-8x7b --gpus 64", "estimate mixtral-8x7b --dp 64"):
        assert output_of(command).startswith(mixtral)
    assert output_of("estimate llama-3-8b").startswith("llama-3-8b: 8,030,261,248 parameters\n")


def test_lora_and_switches_are_printed_and_change_the_memory(output_of):
    out = output_of("plan llama-3-8b --gpus 1 --batch 16 --lora 16 --with 4-bit 8-bit-adam")
    assert "4-bit LoRA 16, 8-bit Adam" in out
    small = json.loads(output_of("estimate llama-3-8b --batch 8 --lora 16 --with 4-bit --json"))
    large = json.loads(output_of("estimate llama-3-8b --batch 8 --json"))
    assert small["memory_bytes"] < large["memory_bytes"] / 4 and small["fits"] and not large["fits"]
    assert small["inputs"]["lora"] == {"rank": 16, "four_bit": True}
    hybrid = output_of("estimate llama-3-8b --dp 16 --zero 3 --shard 8 --batch 16")
    assert "inside a shard" in hybrid and "over shards" in hybrid


def test_the_json_is_as_the_manual_says(output_of):
    printed = json.loads(output_of(f"{PLAN} --train-tokens 1T --json".replace("--gpus 8", "--gpus 64")))
    keys = lambda row: set(re.findall(r"`(\w+)`", re.sub("`--[a-z-]+`", "", row)))
    rows = re.findall(
        r"(?m)^\| (`\w+`(?:, `\w+`)*) \| (.*) \|$",
        MANUAL.split("## For other programs")[1].split("| command | its keys |")[0],
    )
    documented = {name for names, _ in rows for name in keys(names)}
    assert documented == set(printed)
    holds = {name: keys(what) for names, what in rows for name in keys(names)}
    assert holds["inputs"] - {"rank", "four_bit"} == set(printed["inputs"])
    best = printed["best"]
    assert holds["best"] == set(best) | set(best["sure"]) | set(best["interruptions"])
    assert holds["ranked"] == set(printed["ranked"][0]) and holds["flips"] == set(printed["flips"][0])
    layout = re.search(r"A layout has (.*?) and `order`", MANUAL)[0]
    assert keys(layout) == set(printed["best"]["layout"]) == set(printed["flips"][0]["winner"])
    assert "reason" in printed["refused"][0] and "ep" in printed["refused"][0]


@pytest.mark.parametrize(
    "command", ["estimate llama-3-8b --dp 8", "estimate llama-3-8b --gpus 8 --zero 3 --measured 9s"]
)
def test_the_json_of_each_command_is_as_the_manual_says(command, output_of):
    name, printed = command.split()[0], json.loads(output_of(f"{command} --json"))
    row = re.search(rf"(?m)^\| `{name}` \| (.*) \|$", MANUAL.split("| command | its keys |")[1])[1]
    assert set(re.findall(r"`(\w+)`(?!\))", row)) == set(printed)


def test_a_plan_imports_what_it_needs():
    """`plan` must not import PyTorch or modules that this run does not use: start-up is half of its time."""
    code = f"import sys; from three_axes.__main__ import main; main({PLAN.split()!r}); print(*sys.modules)"
    how = dict(capture_output=True, text=True, cwd=ROOT, timeout=300)
    modules = set(subprocess.run([sys.executable, "-c", code], **how).stdout.split())
    assert "three_axes.plan.planner" in modules
    others = ("configs", "flags", "page", "meeting", "remedies", "schedules", "simulation", "traffic")
    unneeded = {"torch", "multiprocessing", "html", "difflib", "importlib.resources"}
    unneeded |= {"three_axes.count.options"}
    assert not modules & (unneeded | {f"three_axes.plan.{name}" for name in others})
