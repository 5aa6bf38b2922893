"""Choice of pages.

Regimes: fewer pages than are forced (overlap of sinks and recent); a budget below what is forced,
exact, and above everything; floors; lists that cap a head; ragged rows and an empty one; a budget
per row; equal weights (compared by weight, as the order of ties is free); more pages than one block
of the packing kernel.
"""

import pytest
import torch

from dspark_kernels.page_select.choice import choose_pages, pack_pages
from dspark_kernels.page_select.op import page_select
from dspark_kernels.page_select.reference import page_select_reference
from dspark_kernels.testing.bounds import poisoned
from dspark_kernels.testing.interpreter import count_launches

SHAPES = {  # pages per row, Hkv, budget per row, max_pages, sinks, recent, floor
    "one-page": ((1,), 1, (4,), 8, 1, 4, 0),
    "overlap": ((4, 5, 6), 2, (2, 20, 11), 8, 1, 4, 0),
    "joint": ((40, 33), 4, (48, 40), 40, 1, 4, 0),
    "floor": ((40,), 3, (24,), 40, 1, 2, 6),
    "capped": ((40,), 2, (40,), 12, 1, 4, 0),
    "everything": ((17, 3), 2, (1000, 1000), 20, 1, 4, 5),
    "empty-row": ((0, 12), 2, (10, 10), 12, 2, 1, 0),
    "nothing-forced": ((20,), 3, (7,), 20, 0, 0, 0),
    "per-row": ((30, 30, 30), 2, (12, 20, 60), 30, 1, 4, 0),
}


def make_weights(shape, seed=0, spread=3.0):
    pages, num_kv = shape[:2]
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(len(pages), num_kv, max(pages) + 2, generator=generator)
    used = torch.arange(max(pages) + 2) < torch.tensor(pages)[:, None, None]
    weights = torch.softmax(torch.where(used, spread * weights, -torch.inf), -1)
    return weights.nan_to_num(0.0)


def form_of(shape):
    return dict(zip(("max_pages", "sinks", "recent", "floor"), shape[3:], strict=True))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_choice_equals_the_reference(shape, seed):
    weights = make_weights(shape, seed)
    given = (weights, torch.tensor(shape[0]), torch.tensor(shape[2]))
    pages, counts = page_select(*given, **form_of(shape))
    expected_pages, expected_counts = page_select_reference(*given, **form_of(shape))
    assert torch.equal(counts, expected_counts)
    assert torch.equal(pages, expected_pages)


def test_among_equal_weights_as_much_weight_is_kept():
    shape = SHAPES["joint"]
    weights = (make_weights(shape) * 40).round() / 40
    given = (weights, torch.tensor(shape[0]), torch.tensor(shape[2]))
    kept = []
    for pages, counts in (
        page_select(*given, **form_of(shape)),
        page_select_reference(*given, **form_of(shape)),
    ):
        share = torch.where(pages >= 0, weights.gather(-1, pages.clamp(min=0).long()), 0.0)
        kept.append((share.sum((1, 2)), counts.sum(1)))
    torch.testing.assert_close(kept[0], kept[1])


def test_the_budget_is_spent_exactly_when_nothing_limits_it():
    shape = SHAPES["joint"]
    _, counts = page_select(
        make_weights(shape), torch.tensor(shape[0]), torch.tensor(shape[2]), **form_of(shape)
    )
    assert counts.sum(1).tolist() == list(shape[2])


def test_a_number_and_a_tensor_of_it_choose_the_same():
    weights = make_weights(SHAPES["joint"])
    pages = torch.tensor(SHAPES["joint"][0])
    one = page_select(weights, pages, 30, max_pages=30)
    other = page_select(weights, pages, torch.tensor([30, 30]), max_pages=30, max_budget=64)
    assert torch.equal(one[0], other[0])


@pytest.mark.parametrize("shape", [*SHAPES.values(), ((1500,), 2, (900,), 700, 1, 4, 0)], ids=str)
def test_the_kernel_packs_like_the_reference(shape, device, monkeypatch):
    from dspark_kernels.page_select import kernel

    form = form_of(shape)
    weights = make_weights(shape).to(device)
    given = (weights, torch.tensor(shape[0], device=device), torch.tensor(shape[2], device=device))
    cap = {**form, "max_pages": min(shape[3], weights.shape[-1])}
    kept = choose_pages(*given, **cap, max_budget=max(shape[2]))
    pages = poisoned((*weights.shape[:2], shape[3]), torch.int32, device)
    counts = poisoned(tuple(weights.shape[:2]), torch.int32, device)
    launches = count_launches(monkeypatch, kernel._page_pack_fwd_kernel)
    kernel.page_pack_fwd(kept, pages.tensor, counts.tensor)
    expected = pack_pages(kept, shape[3])
    assert torch.equal(pages.tensor, expected[0])
    assert torch.equal(counts.tensor, expected[1])
    pages.assert_intact()
    counts.assert_intact()
    assert len(launches) == 1


def test_wrong_arguments_are_named():
    weights, pages = make_weights(SHAPES["joint"]), torch.tensor(SHAPES["joint"][0])
    with pytest.raises(ValueError, match="max_pages must be at least 5; got 3"):
        page_select(weights, pages, 10, max_pages=3)
    with pytest.raises(ValueError, match=r"weights must be one of torch\.float32"):
        page_select(weights.double(), pages, 10, max_pages=30)
