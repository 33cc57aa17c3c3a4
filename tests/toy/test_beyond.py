"""The toy's FSDP, context parallelism and experts have the results of a model in one process (the twin).
Further tests are about runs that hang: their flight records, and the tools that read them.
"""

import pickle
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from drops import b1, b4
from drops.b4 import runs as b4_runs
from drops.b4.runs import seed_of
from helpers import World, toy
from helpers.draw import gantt
from helpers.ranks.failure import RankError
from helpers.toy import context, experts

pytestmark = pytest.mark.waits


@pytest.mark.parametrize("way", ["gather", "ring", "exchange"])
@pytest.mark.parametrize("places", [toy.contiguous, toy.zigzag])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1)], ids=str)
def test_attention_to_other_ranks_keys_is_the_twins(world, way, places, heads):
    def run(ranks):
        members = list(range(ranks))
        group = dist.new_group(members)  # of all 4 ranks, or of 2
        if dist.get_rank() not in members:
            return True
        chance = torch.Generator().manual_seed(1)
        q, k, v, dy = (
            torch.randn(2, n, 16, 4, generator=chance, dtype=torch.float64)
            for n in (*heads, heads[1], heads[0])
        )
        at = places(16, ranks)  # the tokens of each rank
        mine = at[dist.get_rank(group)]
        whole = [x.clone().requires_grad_() for x in (q, k, v)]
        y, _ = context.attend(*whole, context.sees(torch.arange(16), torch.arange(16)))
        y.backward(dy)
        parts = [x[:, :, mine].clone().requires_grad_() for x in (q, k, v)]
        got = getattr(context, f"{way}_attention")(*parts, at, group)
        got.backward(dy[:, :, mine])
        return torch.allclose(got, y[:, :, mine]) and all(
            torch.allclose(p.grad, w.grad[:, :, mine]) for p, w in zip(parts, whole)
        )

    for ranks in (4, 2):
        assert all(world.run(run, ranks))


def test_a_block_on_a_ranks_tokens_is_the_twins(world):
    def run():
        block = toy.ToyTransformer(hidden=32).double().blocks[0]
        x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        at = toy.zigzag(16, 4)
        mine = at[dist.get_rank()]
        got = toy.context_block(block, x[:, mine], context.sees(mine, torch.cat(at)))
        return torch.allclose(got, block(x)[:, mine])

    assert all(world.run(run))


def test_all_tokens_are_somewhere_and_zigzag_is_even():
    for c in (1, 2, 4, 8):
        for places in (toy.contiguous, toy.zigzag):
            assert sorted(torch.cat(places(64, c)).tolist()) == list(range(64))
        assert len({int((at + 1).sum()) for at in toy.zigzag(64, c)}) == 1


def test_a_rank_without_a_key_to_see_adds_nothing():
    q, k, v = (torch.randn(1, 1, n, 4) for n in (3, 5, 5))
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[1] = False
    y, lse = context.attend(q, k, v, mask)
    assert not y[0, 0, 1].any() and lse[0, 0, 1] == -torch.inf and torch.isfinite(y).all()


@pytest.mark.parametrize("number, ep", [(4, 4), (8, 4), (8, 2), (4, 1)])
def test_experts_on_ranks_are_the_twins(world, number, ep):
    def run():
        mesh = init_device_mesh("cpu", (4 // ep, ep), mesh_dim_names=("edp", "ep"))
        chance = torch.Generator().manual_seed(0)
        x, dy = (torch.randn(4, 10, 8, generator=chance, dtype=torch.float64) for _ in range(2))
        twin, rank = toy.Experts(8, number).double(), dist.get_rank()
        whole = x.flatten(0, 1).clone().requires_grad_()
        y = twin(whole)
        y.backward(dy.flatten(0, 1) / 4)
        layer = toy.split_experts(toy.Experts(8, number).double(), mesh["ep"].get_group())
        mine = x[rank].clone().requires_grad_()
        got, load = toy.expert_parallel(layer, mine, mesh["ep"].get_group())
        got.backward(dy[rank])
        toy.average_expert_gradients(layer, dist.group.WORLD, mesh["edp"].get_group())
        first = mesh["ep"].get_local_rank() * number // ep
        pairs = [(got, y.view(4, 10, 8)[rank]), (mine.grad / 4, whole.grad.view(4, 10, 8)[rank])]
        pairs += [(layer.router.weight.grad, twin.router.weight.grad)]
        for mine, its in zip(layer.experts, twin.experts[first:]):
            pairs += [(a.grad, b.grad) for a, b in zip(mine.parameters(), its.parameters())]
        return load.sum().item() == 20 and all(torch.allclose(a, b) for a, b in pairs)

    assert all(world.run(run))


def test_all_tokens_to_one_expert_and_none_to_another(world):
    def run():
        twin, x = toy.Experts(8, k=1).double(), torch.randn(6, 8, dtype=torch.float64)
        twin.bias[2] = 9
        layer = toy.split_experts(toy.Experts(8, k=1).double())
        layer.bias[2] = 9
        y, load = toy.expert_parallel(layer, x)
        y.sum().backward()
        cut, _ = toy.expert_parallel(layer, x, capacity=4)
        busy = layer.experts[0].up.weight.grad.any().item()
        whole = twin(x)
        same = torch.allclose(y, whole) and torch.allclose(cut[:4], whole[:4])
        return load.tolist(), busy, same, cut[4:].any().item()

    results = world.run(run)
    assert all(r[0] == [0, 0, 6, 0] and r[2:] == (True, False) for r in results)
    assert [r[1] for r in results] == [False, False, True, False]


def test_a_token_that_comes_too_late_is_dropped(world):
    class Chosen(toy.Experts):
        def route(self, x):
            return torch.tensor([[0], [0], [1], [1], [1], [2]]), torch.ones(6, 1, dtype=x.dtype)

    def run():
        twin, x = Chosen(8, k=1).double(), torch.randn(6, 8, dtype=torch.float64)
        y, load = toy.expert_parallel(toy.split_experts(Chosen(8, k=1).double()), x, capacity=2)
        late = torch.tensor([1, 1, 1, 1, 0, 1]).unsqueeze(1)
        return load.tolist(), torch.allclose(y, twin(x) * late)

    assert world.run(run) == [([2, 3, 1, 0], True)] * 4


def test_an_uneven_all_to_all_is_counted_by_its_own_sizes(world):
    def run():
        rank = dist.get_rank()
        give = [0, 0, 0, 0]
        give[0] = 3 + rank  # everything to rank 0
        take = [3, 4, 5, 6] if rank == 0 else [0] * 4
        experts.swap(torch.zeros(3 + rank, 5), give, take)

    world.run(run)
    assert world.traffic.counted == [0, 4 * 5 * 4, 5 * 5 * 4, 6 * 5 * 4]


def test_the_bias_rises_for_the_idle():
    layer = toy.Experts(8)
    toy.even_out(layer, torch.tensor([6, 2, 0, 4]), 0.5)
    assert layer.bias.tolist() == [-0.5, 0.5, 0.5, -0.5]


# -- ranks that never arrive ---------------------------------------------------------------------------


def test_pytorchs_own_analyzer_reads_the_flight_records(tmp_path):
    """The analyzer, a separate program, names the rank, the collective's number and the line."""
    stopped = b4.stop(4)
    stopped.write(tmp_path)
    rank, step = b4_runs.odd_one(seed_of(4, 0))
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(tmp_path)]
    report = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stderr
    assert f"Not all ranks joining collective, sequence number: {step + 1}" in report
    assert f"missing ranks: {{{rank}}}" in report and "collective: gloo:all_reduce" in report
    assert re.search(r"<module> at run_4\.py:7", report)
    assert report.count("Not all ranks") == 1  # all earlier collectives matched


@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_analyzer_blames_the_others_where_the_first_rank_is_the_odd_one(number):
    verdict, rank = b4.verdict(b4.stop(number)), b4.truth(number, 0)[0]
    blamed = {int(r) for r in re.findall(r"Culprit rank (\d)", verdict)}
    assert blamed == ({1, 2, 3} if rank == 0 else {rank})


@pytest.mark.parametrize("number", b4.RUNS)
def test_a_run_stops_where_its_seed_says(number):
    stopped = b4.stop(number)
    rank, step = b4_runs.odd_one(seed_of(number, 0))
    assert b4.truth(number, 0)[0] == rank
    calls = {1: 2 * step + 1, 3: 2 * step + 1, 2: step + 2, 6: step + 1}.get(number, step + 1)
    assert max(stopped.last_numbers.values()) == calls
    if number in (4, 5, 7):
        assert [r for r, n in stopped.last_numbers.items() if n < calls] == [rank]
    elif number == 6:
        assert stopped.dead == [(rank + 1) % 4]
        assert stopped.dumps[rank]["entries"][-1]["input_sizes"][0][0] == b4_runs.ROWS + 1
    else:
        names = [stopped.doing(r) for r in range(4)]
        assert [r for r in range(4) if names.count(names[r]) == 1] == [rank]
    assert f"run_{number}.py" in stopped.report and str(stopped.table()) in repr(stopped)


def test_the_sign_of_a_cause_is_in_its_own_run_alone():
    """Each sign that `check` asks for is in one run only."""
    signs = {1: r"if \(?[xy]\b", 2: r"save\(", 3: "except", 5: "new_group", 6: "all_to_all"}
    for number, sign in signs.items():
        assert [n for n in b4.RUNS if re.search(sign, b4_runs.source(n))] == [number]
    finished = [n for n in b4.RUNS if "had finished" in b4_runs.stop(n).report]
    assert finished == [4]


def test_after_a_wrong_answer_the_ranks_are_dealt_anew():
    b4.cells._deals[:] = [0]
    first = {n: b4.truth(n) for n in (2, 1, 3)}
    answer = b4.clinic.check(lambda: first | {2: (*first[2][:2], "the network")})
    assert "dealt anew" in answer.text and b4.deal() == 1 and first != {n: b4.truth(n) for n in first}
    answer = b4.clinic.check(lambda: first)
    assert answer.misconception == "an answer of the last deal" and b4.deal() == 1
    b4.cells._deals[:] = [0]


def test_a_world_writes_flight_records_of_the_call_that_failed(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "rank_"))
    alone = "dist.all_reduce(torch.ones(3))\nif rank != {}: dist.all_reduce(torch.ones(3))"
    with World(2, timeout=1) as world:
        world.run(dist.barrier)
        assert not list(tmp_path.iterdir())
        for silent in (1, 0):  # the second failure is in a new group
            with pytest.raises(RankError, match=f"rank {silent}, which did not come"):
                world.cell(alone.format(silent))
            records = [pickle.loads((tmp_path / f"rank_{r}").read_bytes()) for r in range(2)]
            assert [len(r["entries"]) for r in records] == ([2, 1] if silent else [1, 2])
            last = records[1 - silent]["entries"][-1]
            assert (last["record_id"], last["state"]) == (1, "scheduled")
            assert last["collective_seq_id"] == 2 + silent
            assert all(r["entries"][0]["state"] == "completed" for r in records)
            assert all(r["pg_config"]["0"]["ranks"] == "[0, 1]" for r in records)


def test_where_no_flight_record_can_be_written_the_report_is_the_same(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "nowhere" / "rank_"))
    with World(2, timeout=1) as world, pytest.raises(RankError, match="rank 1, which did not come"):
        world.cell("if rank == 0: dist.barrier()")
    assert "could not write its flight record" in capsys.readouterr().out


def _sharded_step(hybrid, ways):
    """For each way of `fsdp_order`: whether the step equals the twin's, and the bytes that stay gathered."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    groups = (mesh["shard"].get_group(), mesh["replicate"].get_group()) if hybrid else ()
    new = lambda: toy.ToyTransformer(hidden=32, layers=2, seq_len=16).double()
    twin, batch, answers = new(), toy.make_batch(16, 16), []
    whole = toy.twin_step(twin, *batch)
    mine = [toy.my_share(t, dist.get_rank(), 4) for t in batch]
    for m, prefetch, reshard, hold in ways:
        layers = toy.shard_layers(new(), *groups)
        order = toy.fsdp_order(len(layers), m, prefetch, reshard, hold)
        loss = torch.tensor(toy.run_order(layers, order, *mine))
        dist.all_reduce(loss)
        equal = abs(loss.item() / 4 - whole) < 1e-5
        for layer, part in zip(layers, twin):
            flat = torch.cat([p.grad.flatten() for p in part.parameters()])
            flat = torch.nn.functional.pad(flat, (0, layer.shard_size * layer.size - len(flat)))
            shard = flat.chunk(layer.size)[dist.get_rank(layer.group)]
            equal &= torch.allclose(layer.shard.grad, shard, atol=1e-12)
        answers.append((equal, sum(layer.bytes_whole for layer in layers)))
    return answers


@pytest.mark.parametrize("hybrid", [False, True], ids=["all ranks", "replicate x shard"])
def test_every_order_of_fsdp_is_the_twins_and_leaves_nothing_whole(world, hybrid):
    yes = (True, False)
    ways = [(m, early, keep, hold) for m in (1, 4) for early in (0, 1, 9) for keep in yes for hold in yes]
    assert all(answer == (True, 0) for rank in world.run(_sharded_step, hybrid, ways) for answer in rank)


def test_an_order_gathers_as_often_as_it_must_and_holds_as_few_layers_as_it_can():
    count = lambda order, what: sum(line[0] == what for line in order)
    for n, m in ((1, 1), (2, 3), (6, 4)):
        plain, off = toy.fsdp_order(n, m), toy.fsdp_order(n, m, reshard=False)
        kept = toy.fsdp_order(n, m, reshard=False, hold=True)
        assert [count(order, "gather") for order in (plain, off, kept)] == [2 * n * m, n * m, n]
        assert [count(order, "reduce") for order in (plain, off, kept)] == [n * m, n * m, n]
        assert [b1.whole_at_once(toy.fsdp_order(n, m, early)) for early in (0, 1, 2)] == [
            min(n, early + 1) for early in (0, 1, 2)
        ]
        assert b1.whole_at_once(off) == b1.whole_at_once(kept) == n


def test_an_order_prefetches_one_layer_both_ways():
    order = " ".join(what[0] + str(i) for what, i, _ in toy.fsdp_order(3))
    assert order == "g0 g1 F0 f0 g2 F1 f1 F2 f2 g2 g1 B2 f2 r2 g0 B1 f1 r1 B0 f0 r0"


def test_fsdp_refuses_what_cannot_be(world):
    def run(order, rows=4, tied=False):
        try:
            layers = toy.shard_layers(toy.ToyTransformer(hidden=32, layers=1, seq_len=16, tied=tied))
            toy.run_order(layers, order, *toy.make_batch(rows, 16))
        except (RuntimeError, ValueError) as e:
            return str(e)

    whole = toy.fsdp_order(3)
    no_second = [line for i, line in enumerate(whole) if line[0] != "gather" or i < 5]
    assert "gather them before F" in world.run(run, no_second)[0]
    assert "gather them before F" in world.run(run, whole[1:])[0]
    assert "3 sequences do not divide by 2" in world.run(run, toy.fsdp_order(3, 2), rows=3)[0]
    assert "share a parameter" in world.run(run, whole, tied=True)[0]


@pytest.mark.parametrize("how", [{}, {"reshard": False}, {"m": 2}, {"m": 2, "reshard": False}], ids=str)
def test_fully_shard_makes_the_same_calls(world, how):
    made = lambda way: [(row.op, row.calls, row.algorithmic) for row in way(world, **how).ranks[0]]
    assert made(b1.step_traffic) == made(b1.step_by_pytorch)


def test_gathers_and_gathered_weights_are_in_the_timeline():
    with World(4, fabric=b1.ONE_NODE) as world:
        timeline = b1.order_timeline(world, toy.fsdp_order(b1.LAYERS))
    for rank in range(4):
        assert timeline.peak(rank) == 2 * b1.BLOCK and timeline.levels[rank][-1][1] == 0
        under_way = timeline.streams[rank]
        assert [s.kind for s in under_way].count("reduce") == b1.LAYERS
        assert all(a.end <= b.start + 1e-9 for a, b in zip(under_way, under_way[1:]))
    picture = gantt.timeline({"all": timeline}, "A step")
    assert "B0" in repr(picture)
    assert "weights arrive" in "".join(text.get_text() for text in picture.figure.texts)
