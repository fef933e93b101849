"""The layout arithmetic, for any sizes and any number of ranks."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zk.core.units import ALIGN, PAGE, Layout
from zk.offload.transfer import evenly

sizes = st.lists(st.integers(0, 5000), min_size=1, max_size=12)
layouts = st.builds(Layout.of, sizes, st.integers(1, 9))
whole_layouts = st.builds(Layout.of, sizes, st.integers(1, 9), st.just(True))


@given(layouts)
def test_parameters_are_aligned_disjoint_and_in_order(layout: Layout) -> None:
    end = 0
    for index in range(len(layout.numels)):
        where = layout.whole(index)
        assert where.start % ALIGN == 0
        assert end <= where.start < end + ALIGN
        assert where.stop - where.start == layout.numels[index]
        end = where.stop
    assert end <= layout.numel


@given(whole_layouts, st.sampled_from([64, 2048]), st.integers(100, 9000))
def test_neither_slices_nor_chunks_cut_what_is_whole(layout: Layout, multiple: int, most: int) -> None:
    assert layout.shard_numel % PAGE == 0
    for rank in range(layout.world):
        held = layout.shard(rank)
        chunks = evenly(0, layout.shard_numel, most, multiple, layout.uncut(held))
        assert not layout.numel or [chunk.start for chunk in chunks] == [0, *(chunk.stop for chunk in chunks[:-1])]
        assert not layout.numel or chunks[-1].stop == layout.shard_numel
        for index in range(len(layout.numels)):
            part, whole = layout.part(index, held)
            assert whole.stop - whole.start in (0, layout.numels[index])
            assert part.start == part.stop or any(chunk.start <= part.start and part.stop <= chunk.stop for chunk in chunks)
        assert max((chunk.stop - chunk.start for chunk in chunks), default=0) <= max(layout.numels) + PAGE + 2 * (most + multiple)


@given(whole_layouts)
def test_each_whole_parameter_has_a_place_and_the_padding_after_it(layout: Layout) -> None:
    places = sorted(zip(layout.offsets, layout.stops, layout.numels, strict=True))
    assert places[0][0] == 0 and places[-1][1] == layout.numel
    assert all(start + numel <= stop for start, stop, numel in places if numel)
    assert all(one[1] == other[0] for one, other in itertools.pairwise(places)), places


@given(layouts)
def test_shards_tile_the_buffer_evenly(layout: Layout) -> None:
    shards = [layout.shard(rank) for rank in range(layout.world)]
    assert shards[0].start == 0 and shards[-1].stop == layout.numel
    assert all(a.stop == b.start for a, b in itertools.pairwise(shards))
    assert {shard.stop - shard.start for shard in shards} == {layout.shard_numel}
    assert layout.shard_numel % ALIGN == 0


@given(layouts)
def test_padding_is_bounded_by_one_line_per_parameter_and_rank(layout: Layout) -> None:
    assert 0 <= layout.numel - sum(layout.numels) < ALIGN * (len(layout.numels) + layout.world)


@given(st.one_of(layouts, whole_layouts), st.randoms())
def test_parts_of_all_ranks_put_together_are_the_parameter(layout: Layout, random: object) -> None:
    buffer = list(range(layout.numel))
    for index in range(len(layout.numels)):
        parameter = buffer[layout.whole(index)]
        collected: list[int] = []
        for rank in range(layout.world):
            held = layout.shard(rank)
            in_shard, in_parameter = layout.part(index, held)
            assert buffer[held][in_shard] == parameter[in_parameter]
            collected += parameter[in_parameter]
        assert collected == parameter


@given(layouts)
def test_a_part_of_the_whole_buffer_is_the_whole_parameter(layout: Layout) -> None:
    for index, numel in enumerate(layout.numels):
        assert layout.part(index, slice(0, layout.numel)) == (layout.whole(index), slice(0, numel))


def test_impossible_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match="world >= 1"):
        Layout.of([1], 0)
    with pytest.raises(ValueError, match="sizes >= 0"):
        Layout.of([-1], 2)
