"""Accounts of drafting: what pauses it, and what buys another try."""

from __future__ import annotations

from dspark_hf.verification.schedules.accounts import (
    PROBE_CREDIT,
    PROBE_TOKENS,
    REFILL,
    Accounts,
)

WAIT = round(PROBE_CREDIT / REFILL)
"""Held-back rounds that buy a try."""


def waited(accounts: Accounts, most: int) -> int:
    """Return after how many held-back rounds a try is due, at most so many."""
    for count in range(most):
        if accounts.allowed(0, 0):
            return count
        accounts.refill([0])
    return most


def test_wins_buy_no_try_of_what_does_not_look_like_paying() -> None:
    accounts = Accounts()
    for _ in range(20):
        accounts.settle(0, gained=2.0, spent=0.5)
    assert accounts.allowed(0, 0) == 0
    assert accounts.allowed(0, 3) == 3


def test_waiting_buys_a_try_and_what_it_costs_is_waited_for_again() -> None:
    accounts = Accounts()
    assert abs(waited(accounts, 1000) - WAIT) <= 1
    assert accounts.allowed(0, 0) == PROBE_TOKENS
    accounts.settle(0, gained=0.0, spent=0.4)
    assert accounts.allowed(0, 0) == 0
    assert abs(waited(accounts, 1000) - 0.4 / REFILL) <= 1


def test_a_debt_is_paid_back_before_the_next_try() -> None:
    accounts = Accounts()
    accounts.settle(0, gained=0.0, spent=4.5)
    assert accounts.is_paused(0)
    assert accounts.allowed(0, 5) == 0
    # The start's half token is gone with it: four to pay back, and the price of a try.
    assert abs(waited(accounts, 1000) - (4.0 + PROBE_CREDIT) / REFILL) <= 1


def test_small_losses_among_wins_do_not_add_up_to_a_debt() -> None:
    accounts = Accounts()
    for turn in range(100):
        accounts.settle(0, gained=2.0 if turn % 2 else 0.0, spent=0.5)
    assert waited(accounts, 1000) <= WAIT + 1


def test_one_that_may_not_pause_is_always_allowed() -> None:
    accounts = Accounts(may_pause=False)
    accounts.settle(0, gained=0.0, spent=50.0)
    assert not accounts.is_paused(0)
    assert accounts.allowed(0, 5) == 5
    assert accounts.allowed(0, 0) == 1
