"""Copies between the decision and the commit that says they were done."""

from __future__ import annotations

from collections import Counter

from minivllm.cache.transfers import PendingCopies, Transfers
from minivllm.request import BlockCopy

NOTHING = PendingCopies()


def test_copies_stay_pending_until_they_are_done() -> None:
    transfers = Transfers()
    transfers.swap_out([BlockCopy(3, 0), BlockCopy(4, 1)])
    transfers.swap_in("a", [BlockCopy(2, 5)])
    transfers.copy_on_write(BlockCopy(6, 7))
    pending = transfers.pending()
    assert pending == PendingCopies(
        swap_out=(BlockCopy(3, 0), BlockCopy(4, 1)),
        swap_in=(BlockCopy(2, 5),),
        copies=(BlockCopy(6, 7),),
    )
    assert transfers.pending() == pending
    assert transfers.done(pending) == ([2], [6])
    assert transfers.pending() == NOTHING
    assert transfers.done(pending) == ([], [])


def test_what_was_added_since_the_plan_stays_pending() -> None:
    transfers = Transfers()
    transfers.swap_out([BlockCopy(3, 0)])
    planned = transfers.pending()
    transfers.swap_out([BlockCopy(4, 1)])
    transfers.done(planned)
    assert transfers.pending() == PendingCopies(swap_out=(BlockCopy(4, 1),))


def test_a_host_block_given_to_another_since_the_plan_still_waits_for_the_other_s_content() -> None:
    transfers = Transfers()
    transfers.swap_out([BlockCopy(3, 0)])
    planned = transfers.pending()
    transfers.cancel_swap_out([0, 8])
    transfers.swap_out([BlockCopy(3, 0)])  # equal, but decided on later
    transfers.done(planned)
    assert transfers.pending() == PendingCopies(swap_out=(BlockCopy(3, 0),))


def test_a_cancelled_swap_in_gives_back_no_host_blocks_when_its_plan_is_done() -> None:
    transfers = Transfers()
    transfers.swap_in("a", [BlockCopy(2, 5)])
    planned = transfers.pending()
    assert transfers.swap_in_requests() == ("a",)
    assert transfers.swapping_in("a") == (BlockCopy(2, 5),)
    transfers.cancel_swap_in("a")
    assert transfers.swapping_in("a") == ()
    assert transfers.done(planned) == ([], [])


def test_a_source_is_pinned_once_per_copy_on_write() -> None:
    transfers = Transfers()
    transfers.copy_on_write(BlockCopy(6, 7))
    transfers.copy_on_write(BlockCopy(6, 8))
    assert transfers.pins(6) == 2
    assert transfers.pinned() == Counter({6: 2})
    assert transfers.cancel_copy(7) == 6
    assert transfers.cancel_copy(7) is None
    assert transfers.pins(6) == 1
    assert transfers.done(transfers.pending()) == ([], [6])
    assert transfers.pins(6) == 0
    assert transfers.pinned() == Counter()


def test_the_content_of_a_copy_s_target_is_still_in_its_source() -> None:
    transfers = Transfers()
    transfers.copy_on_write(BlockCopy(6, 7))
    assert [transfers.source(block_id) for block_id in (6, 7, 8)] == [6, 6, 8]
    transfers.done(transfers.pending())
    assert transfers.source(7) == 7
