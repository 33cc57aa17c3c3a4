"""The emulated caching allocator follows the rules of PyTorch's, and fragments as drop 10 shows."""

import pytest
import torch

from drops import d10
from helpers.emulate.allocator import MIB, CachingAllocator


def test_small_tensors_share_a_segment_and_large_ones_have_their_own():
    a = CachingAllocator(100 * MIB)
    a.take(1, 1000)
    a.take(2, MIB)
    assert (a.allocated, a.reserved) == (1000 + MIB, 2 * MIB)
    a.take(3, MIB + 1)  # a block of 1 to 10 MiB is cut from a segment of 20 MiB
    assert a.reserved == 22 * MIB
    a.take(4, 5 * MIB)
    assert a.reserved == 22 * MIB
    a.take(5, 15 * MIB + 1)  # a larger block has a segment of its size, rounded up to 2 MiB
    assert a.reserved == 38 * MIB


def test_the_smallest_block_that_will_do_is_taken_and_the_rest_split_off():
    a = CachingAllocator(100 * MIB)
    a.take(1, 16 * MIB), a.take(2, 12 * MIB)
    a.give(1), a.give(2)
    assert (a.allocated, a.reserved) == (0, 28 * MIB)
    a.take(3, 11 * MIB)
    assert a.reserved == 28 * MIB
    sizes = {s["total_size"]: [b["size"] for b in s["blocks"]] for s in a.snapshot()}
    assert sizes == {16 * MIB: [16 * MIB], 12 * MIB: [12 * MIB]}  # 1 MiB or less is not split off
    a.give(3), a.take(4, 10 * MIB)
    assert [b["size"] for b in a.snapshot()[1]["blocks"]] == [10 * MIB, 2 * MIB]


def test_free_neighbours_become_one_block_again():
    a = CachingAllocator(100 * MIB)
    for key in range(4):
        a.take(key, 5 * MIB)
    a.give(1), a.give(3), a.give(2)
    assert [b["size"] for b in a.snapshot()[0]["blocks"]] == [5 * MIB, 15 * MIB]
    a.give(0)
    assert [b["size"] for b in a.snapshot()[0]["blocks"]] == [20 * MIB] and a.allocated == 0


def test_empty_segments_go_back_and_one_tensor_keeps_a_whole_one():
    a = CachingAllocator(40 * MIB)
    a.take(1, 20 * MIB), a.give(1)
    a.take(2, 30 * MIB)  # the device has no room for both
    assert (a.retries, a.reserved) == (1, 30 * MIB)
    a.give(2)
    a.take(3, 2 * MIB)  # splits the free segment of 30 MiB
    sentence = "2.10 MB is allocated .* 29.4 MB is reserved .* unalloc"
    with pytest.raises(torch.OutOfMemoryError, match=sentence):
        a.take(4, 29 * MIB)
    assert sum(s["total_size"] - s["active_size"] for s in a.at_failure) == 28 * MIB
    a.give(4)  # was never taken
    assert a.allocated == 2 * MIB


def test_the_allocators_sizes_scale_with_a_unit():
    a = CachingAllocator(1e6, unit=1024)
    a.take(1, 1024)
    assert a.reserved == 2048


@pytest.mark.parametrize("name, lengths", [("varied", d10.VARIED), ("same", d10.SAME)])
def test_the_recorded_fragmentation_can_be_recorded_again(name, lengths):
    recorded, again = d10.load_fragmented(name), d10.fragment(lengths)
    assert again.tokens == recorded.tokens and bool(again.error) == (name == "varied") == bool(recorded.error)
    assert again.allocated == pytest.approx(recorded.allocated, rel=0.03)
    assert again.reserved == pytest.approx(recorded.reserved, rel=0.05)


def test_what_drop_10_says_of_fragmentation():
    varied, same = d10.load_fragmented("varied"), d10.load_fragmented("same")
    assert max(varied.tokens) == max(same.tokens) and len(same.tokens) == len(d10.SAME)
    assert max(varied.allocated) < max(same.allocated)
    free = [b["size"] for s in varied.segments for b in s["blocks"] if b["state"] == "inactive"]
    asked = 4 * 4 * max(varied.tokens) * 256  # bytes of the scores, or of their gradient
    assert sum(free) > asked > max(free)


def test_half_the_microbatch_is_half_the_memory_and_in_the_end_not_free():
    measured = d10.by_microbatch()
    assert list(measured) == [16, 8, 4, 2, 1]
    for b, (kept, _) in measured.items():
        assert kept == pytest.approx(measured[16][0] * b / 16, rel=0.02)
    assert measured[1][1] > 1.3 * measured[16][1]  # CPU seconds, which do not depend on other programs
