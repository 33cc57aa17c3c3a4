"""The planner's command line: what it takes, what it prints, and that its JSON is as the manual says."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from three_axes.__main__ import main
from three_axes.plan import CLUSTERS, MODELS, Job, Layout, estimate
from three_axes.plan.frameworks import find_framework

ROOT = Path(__file__).parents[2]
MANUAL = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
LARGE = "plan llama-3-70b --gpus 64 --batch 128 --seq 8192"
PLAN = "plan llama-3-8b --gpus 8 --cluster dgx-h100 --framework megatron-lm"


@pytest.fixture
def output_of(capsys):
    def run(command: str, rc: int = 0) -> str:
        assert main(command.split()) == rc
        got = capsys.readouterr()
        return got.err if rc else got.out

    return run


def test_the_command_line(output_of):
    out = output_of(f"{LARGE} --cluster dgx-h100")
    assert "what would change the winner" in out and "best: DP" in out and "how" not in out
    assert max(map(len, out.splitlines())) < 120  # formulas are asked for
    assert "gemm_efficiency" in output_of(f"{LARGE} --explain")
    assert "ZB-V" in output_of(f"{LARGE} --schedules 1f1b zb-v --tp 8")
    chosen = output_of(
        "plan llama-3-70b --gpus 64 --tp 8 --pp 2 --zero 1 --recompute none --chunks 2 --why 4,8,2"
    )
    assert "DP 4 · TP 8 · PP 2: the fastest" in chosen and "v 4" not in chosen
    assert "optimizer" in output_of("memory llama-3-70b --tp 8 --pp 2 --dp 4 --zero 1 --batch 128 --seq 8192")
    bubble = output_of("bubble --pp 4 --microbatches 8")
    assert "27.27% of wall time idle\nheld at once, by rank: [4, 3, 2, 1]" in bubble
    sent = json.loads(output_of("bytes llama-3-8b --dp 8 --batch 64 --json"))["bytes"]["first"]
    assert sent["dp"] == pytest.approx(2 * 7 / 8 * 2 * MODELS["llama-3-8b"].params) and sent["tp"] == 0
    stages = json.loads(output_of("bytes llama-3-8b --pp 4 --batch 64 --json"))["bytes"]
    assert stages["middle"]["pp"] == 2 * stages["first"]["pp"] == 2 * stages["last"]["pp"]


def test_what_other_programs_read(output_of):
    printed = json.loads(output_of(f"{LARGE} --framework megatron-lm --gradients 2 --json"))
    assert printed["inputs"]["framework"] == "megatron-lm" and printed["inputs"]["gradient_bytes"] == 2
    first = printed["ranked"][0]
    assert first["step_seconds"] == pytest.approx(printed["best"]["step_seconds"])
    assert first["layout"] == printed["best"]["layout"] and first["layout"]["order"] == ["pp", "dp", "tp"]
    assert printed["flips"][0]["winner"]["dp"] and printed["refused"][0]["reason"]
    rebuilt = Layout(**first["layout"] | {"order": tuple(first["layout"]["order"])})
    framework = find_framework("megatron-lm", gradient_bytes=2)
    job = Job(MODELS["llama-3-70b"], CLUSTERS["dgx-h100"], 128, 8192, framework)
    assert estimate(job, rebuilt).step_seconds == pytest.approx(first["step_seconds"])


def test_a_terminal_without_bars_or_with_a_closed_pipe():
    command = [sys.executable, "-m", "three_axes", "memory", "llama-3-8b", "--dp", "8", "--zero", "3"]
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
        ("--batch-tokens 4M --seq 8192", 512),  # powers of 1024: 4,000,000 would leave a part
        ("--batch-tokens 4m --seq 4000", 1000),
        ("--batch-tokens 1,048,576 --seq 8192", 128),
        ("--batch-tokens 262144 --seq 4096", 64),
        ("--batch 64", 64),
        ("", 128),
    ],
)
def test_tokens_in_place_of_sequences(output_of, given, batch):
    printed = json.loads(output_of(f"memory llama-3-8b --dp 2 {given} --json"))
    assert printed["inputs"]["global_batch"] == batch


@pytest.mark.parametrize(
    "command, sentence",
    [
        (f"{PLAN} --batch-tokens 5000 --seq 4096", "no whole number of sequences of 4,096; take 4,096"),
        (f"{PLAN} --batch-tokens many", "'many' is no number of tokens"),
        (f"{PLAN} --batch-tokens=-4M", "'-4M' is no number of tokens"),
        (f"{PLAN} --batch-tokens 4M --batch 64", "not both"),
        (f"{PLAN} --train-tokens 15Q", "'15Q' is no number of tokens"),
        (f"{PLAN} --price -1", "--price must be a number of at least 0"),
        (f"{PLAN} --lora 0", "rank of LoRA must be a whole number of at least 1"),
        (f"{PLAN} --four-bit", "--lora-on and --four-bit belong to --lora"),
        (f"{PLAN} --lora-on attention", "belong to --lora"),
        (f"{PLAN} --loss-chunks 0", "loss_chunks must be a whole number"),
        (f"{PLAN} --shard -2", "shard must be a whole number"),
        (f"{PLAN} --chunks -1", "most_chunks must be a whole number of at least 1, not -1"),
        (f"{PLAN} --report /nowhere/at/all.html", "cannot write /nowhere/at/all.html: No such file"),
        (f"{PLAN} --lora 16 --flags megatron", "no flag for LoRA"),
        ("memory llama-3-8b --dp 8 --zero 3 --shard 3 --batch 8", "shard 3 does not divide the 8 replicas"),
        ("plan llama-3-70b --gpus 8", "it fits with LoRA (--lora 16)"),
        ("plan llama-3-405b --gpus 8", "does not fit"),
        ("plan llama-3-70bb --gpus 64", "the nearest is 'llama-3-70b'"),
        ("plan llama-3-70b --gpus 0", "gpus must be a whole number"),
        ("plan llama-3-70b --gpus 8 --cluster dgx-h1000", "the nearest is 'dgx-h100'"),
        ("memory llama-3-70b --tp 3", "take 2 or 4"),
        ("memory llama-3-70b --framework megatorn", "the nearest is 'megatron-lm'"),
        ("bubble --pp 4 --microbatches 9 --schedule interleaved", "take 8 or 10"),
    ],
)
def test_what_cannot_be_is_one_sentence(output_of, command, sentence):
    err = output_of(command, rc=2)
    assert sentence in err and err.count("\n") == 1 and "Traceback" not in err


def test_hours_money_flags_and_a_page(output_of, tmp_path):
    path = tmp_path / "page.html"
    out = output_of(f"{PLAN} --seq 4096 --train-tokens 1T --price 2.5 --flags megatron --report {path}")
    speed = float(re.search(r"step, ([\d,]+) tokens/s/GPU", out)[1].replace(",", ""))
    hours = float(re.search(r"take ([\d,]+) GPU-hours", out)[1].replace(",", ""))
    assert hours == pytest.approx(1e12 / speed / 3600, rel=1e-3)
    trains = float(re.search(r"([\d.]+)% of the time trains", out)[1]) / 100
    paid = float(re.search(r"GPU-hour that is ([\d,]+)", out)[1].replace(",", ""))
    assert trains < 1 and paid == pytest.approx(2.5 * hours / trains, rel=1e-3)
    assert "--tensor-model-parallel-size" in out and path.read_text(encoding="utf-8").startswith("<!doctype")


def test_sizes_to_ask_about_are_at_least_1(capsys):
    with pytest.raises(SystemExit):
        main(f"{PLAN} --why 0,1,1".split())
    assert "'0,1,1' is not DP,TP,PP, each at least 1" in capsys.readouterr().err


def test_names_from_files_steer_neither_terminal_nor_page(output_of, tmp_path):
    name, model, cluster = "<b>\x1b[2J", tmp_path / "model.json", tmp_path / "cluster.json"
    model.write_text(json.dumps(dict(name=name, layers=4, hidden=256, heads=4, vocab=256)))
    device = dict(name=name, flops=1e14, achievable=1e14, bandwidth=1e12, memory=1e11)
    cluster.write_text(json.dumps(dict(name=name, device=device, all_to_all=[3e11, 4e10])))
    out = output_of(f"plan {model} --cluster {cluster} --gpus 8 --report {tmp_path / 'page.html'}")
    assert out.count("<b>�[2J") >= 3 and "\x1b" not in out
    page = (tmp_path / "page.html").read_text(encoding="utf-8").split("<h2>Recommendation")[0]
    assert page.count("&lt;b&gt;�[2J") == 3 and "<b>" not in page
    err = output_of(f"plan {model} --gpus 8 --cluster {tmp_path}/\x1b[2J.json", rc=2)
    assert "�[2J.json: No such file" in err and "\x1b" not in err


def test_what_is_trained_is_said(output_of):
    out = output_of("plan llama-3-8b --gpus 1 --batch 16 --lora 16 --four-bit --lora-on attention --rows 1")
    assert "4-bit LoRA 16 of attention" in out
    small = json.loads(output_of("memory llama-3-8b --batch 8 --lora 16 --four-bit --json"))
    large = json.loads(output_of("memory llama-3-8b --batch 8 --json"))
    assert small["memory_bytes"] < large["memory_bytes"] / 4 and small["fits"] and not large["fits"]
    asked = {"rank": 16, "matrices": ["attention", "feed-forward"], "four_bit": True}
    assert small["inputs"]["lora"] == asked
    hybrid = output_of("bytes llama-3-8b --dp 16 --zero 3 --shard 8 --batch 16")
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
    assert holds["inputs"] - {"rank", "matrices", "four_bit"} == set(printed["inputs"])
    best = printed["best"]
    assert holds["best"] == set(best) | set(best["sure"]) | set(best["interruptions"])
    assert holds["ranked"] == set(printed["ranked"][0]) and holds["flips"] == set(printed["flips"][0])
    layout = re.search(r"A layout has (.*?) and `order`", MANUAL)[0]
    assert keys(layout) == set(printed["best"]["layout"]) == set(printed["flips"][0]["winner"])
    assert "reason" in printed["refused"][0] and "ep" in printed["refused"][0]


@pytest.mark.parametrize(
    "command",
    ["bytes llama-3-8b --dp 8", "bubble --pp 4 --microbatches 8", "normal llama-3-8b --gpus 8 --step 9"],
)
def test_the_json_of_each_command_is_as_the_manual_says(command, output_of):
    name, printed = command.split()[0], json.loads(output_of(f"{command} --json"))
    row = re.search(rf"(?m)^\| `{name}` \| (.*) \|$", MANUAL.split("| command | its keys |")[1])[1]
    assert set(re.findall(r"`(\w+)`(?!\))", row)) == set(printed)


def test_why_and_flips_take_all_axes(output_of):
    out = output_of(
        "plan deepseek-v2-lite --gpus 16 --batch 64 --seq 4096 --framework megatron-lm --why 8,1,2,1,8"
    )
    assert "EP 8" in out and re.search(r"number \d+ of \d+ sizes|the fastest", out)


def test_a_plan_imports_what_it_needs():
    """Start-up is half of what the command takes."""
    code = f"import sys; from three_axes.__main__ import main; main({PLAN.split()!r}); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT).stdout
    modules = set(loaded.split())
    assert "three_axes.plan.planner" in modules
    others = ("configs", "flags", "page", "meeting", "remedies", "schedules", "simulation", "traffic")
    unneeded = {"torch", "multiprocessing", "html", "difflib", "importlib.resources"}
    unneeded |= {"three_axes.count.options"}
    assert not modules & (unneeded | {f"three_axes.plan.{name}" for name in others})
