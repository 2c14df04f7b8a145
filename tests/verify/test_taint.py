"""Derived bytes of a buffer against a map of every byte, and the rule of each kind of operation."""

from __future__ import annotations

import random

import pytest
import torch

from uncast.verify.buffers import byte_range, distinct_elements
from uncast.verify.taint import Spans, derived_bytes


@pytest.mark.parametrize("seed", range(20))
def test_dense_writes_count_each_byte_once(seed: int) -> None:
    chooser, spans, truth = random.Random(seed), Spans(), [False] * 200
    for _ in range(60):
        start = chooser.randrange(200)
        end = chooser.randrange(start, 201)
        tainted = chooser.random() < 0.6
        if tainted:
            spans.add(start, end, end - start)
        else:
            spans.clear(start, end)
        truth[start:end] = [tainted] * (end - start)
        assert spans.total == sum(truth)
        a = chooser.randrange(199)
        assert spans.touches(a, a + 1) is truth[a]


def test_strided_writes_add_up_to_the_buffer_and_no_further() -> None:
    spans = Spans()
    spans.add(0, 1000, 900)  # nine columns of ten
    assert spans.total == 900
    spans.add(0, 1000, 100)  # the tenth
    assert spans.total == 1000
    spans.add(0, 500, 450)  # again, on fewer rows
    assert spans.total == 1000


def test_overlapping_strided_writes_keep_the_rest() -> None:
    spans = Spans()
    spans.add(0, 100, 50)
    spans.add(50, 150, 25)
    assert spans.total == 75 and spans.ranges == [(0, 50, 0.5), (50, 100, 0.75), (100, 150, 0.25)]
    spans.add(10, 10, 5)
    assert spans.total == 75


def test_ranges_of_views() -> None:
    base = torch.zeros(10, 20, dtype=torch.float32)
    assert byte_range(base) == (0, 800)
    assert byte_range(base[2:4]) == (160, 320)
    assert byte_range(base[:, 5:7]) == (20, 9 * 80 + 28)
    assert byte_range(base[:0]) == (0, 0)
    assert distinct_elements(base[:1].expand(10, 20)) == 20


@pytest.mark.parametrize(
    ("name", "output", "derived", "count"),
    [
        ("mm", (8, 8), [(8, 100)], 0),
        ("addmm_", (8, 8), [(8, 100)], 0),
        ("sum", (8,), [(8, 100)], 0),
        ("sum", (8, 50), [(8, 50, 1)], 1600),
        ("amax", (8, 50), [(8, 50, 2)], 1600),
        ("clone", (8, 100), [(8, 100)], 3200),
        ("index_select", (20, 100), [(8, 100)], 8000),
        ("cat", (30, 100), [(8, 100), (2, 100)], 4000),
        ("mul", (8, 100), [(8, 1)], 32),
        ("mul_", (8, 100), [(8, 100), (8, 1)], 3200),
        ("made_up_yesterday", (8, 100), [(8, 100)], 3200),
        ("clone", (8, 100), [], 0),
    ],
)
def test_the_rule_of_each_kind(name: str, output: tuple[int, ...], derived: list[tuple[int, ...]], count: int) -> None:
    assert derived_bytes(name, torch.empty(output), [torch.empty(shape) for shape in derived]) == count


def test_a_mask_is_no_copy() -> None:
    assert derived_bytes("gt", torch.empty(8, 100, dtype=torch.bool), [torch.empty(8, 100)]) == 0
    assert derived_bytes("_to_copy", torch.empty(8, 100, dtype=torch.bool), [torch.empty(8, 100)]) == 0


@pytest.mark.parametrize("name", ["clone", "copy_", "index_select", "logical_not", "bitwise_and"])
def test_bytes_that_are_viewed_as_bool_are_no_mask(name: str) -> None:
    viewed = torch.empty(8, 100, dtype=torch.bool)
    assert derived_bytes(name, viewed, [viewed]) == 800


@pytest.mark.parametrize("name", ["empty_like", "zeros_like", "full_like", "rand_like", "new_zeros", "new_empty"])
def test_what_takes_only_the_shape_takes_no_data(name: str) -> None:
    assert derived_bytes(name, torch.empty(8, 100), [torch.empty(8, 100)]) == 0
