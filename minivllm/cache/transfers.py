"""Block copies that were decided on and not yet carried out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from minivllm.request import BlockCopy

__all__ = ["PendingCopies", "Transfers"]


@dataclass(frozen=True, slots=True)
class PendingCopies:
    """Copies for the next plan, in the order in which they are to be done; see `StepPlan`."""

    swap_out: tuple[BlockCopy, ...] = ()
    swap_in: tuple[BlockCopy, ...] = ()
    copies: tuple[BlockCopy, ...] = ()


class Transfers:
    """Copies from the decision until a commit says they were done.

    A plan that is given up was not run, so its copies stay pending and the next plan has them
    again; one whose run broke off says which it had finished. What a pending copy reads must
    therefore outlast it: a swap-in keeps its host blocks, and a copy on write keeps the writer's
    reference to the source (`pins`). A swap-out needs neither, being done before anything of the
    same plan is written; only `BlockManager.unused_slots` has to leave its sources alone.

    Purely bookkeeping: references and pools are the `BlockManager`'s to change.
    """

    def __init__(self) -> None:
        self._out: dict[int, BlockCopy] = {}  # by host block
        self._in: dict[str, tuple[BlockCopy, ...]] = {}  # by request
        self._copies: dict[int, BlockCopy] = {}  # by device block written
        self._pins: Counter[int] = Counter()

    # --- questions (pure) -------------------------------------------------------------------

    def pending(self) -> PendingCopies:
        """What the next plan has to carry out."""
        return PendingCopies(
            swap_out=tuple(self._out.values()),
            swap_in=tuple(copy for copies in self._in.values() for copy in copies),
            copies=tuple(self._copies.values()),
        )

    def pins(self, block_id: int) -> int:
        """How many pending copies on write read a block; each holds a reference to it."""
        return self._pins[block_id]

    def pinned(self) -> Counter[int]:
        """Pins by block."""
        return +self._pins

    def swapping_in(self, request_id: str) -> tuple[BlockCopy, ...]:
        """A request's swap-in that is not yet done; empty if there is none."""
        return self._in.get(request_id, ())

    def swap_in_requests(self) -> tuple[str, ...]:
        """Requests whose swap-in is not yet done."""
        return tuple(self._in)

    def source(self, block_id: int) -> int:
        """The device block that holds now what `block_id` will hold after the copies on write."""
        copy = self._copies.get(block_id)
        return copy.source if copy else block_id

    # --- changes ----------------------------------------------------------------------------

    def swap_out(self, copies: Iterable[BlockCopy]) -> None:
        """Copies of device blocks to host blocks just taken."""
        self._out.update((copy.target, copy) for copy in copies)

    def cancel_swap_out(self, host_blocks: Iterable[int]) -> None:
        """Host blocks go back to the pool: nothing has to be copied there any more."""
        for host_block in host_blocks:
            self._out.pop(host_block, None)

    def swap_in(self, request_id: str, copies: Iterable[BlockCopy]) -> None:
        """A request's host blocks to its new device blocks."""
        self._in[request_id] = tuple(copies)

    def cancel_swap_in(self, request_id: str) -> None:
        """A request loses the device blocks it was to be swapped into."""
        del self._in[request_id]

    def copy_on_write(self, copy: BlockCopy) -> None:
        """A writer's own copy of a shared block; its reference to the source becomes a pin."""
        self._copies[copy.target] = copy
        self._pins[copy.source] += 1

    def cancel_copy(self, block_id: int) -> int | None:
        """A copy's owner loses it. Returns the source, now without this pin, if it was pending."""
        copy = self._copies.pop(block_id, None)
        if copy is None:
            return None
        self._unpin(copy.source)
        return copy.source

    def done(self, carried_out: PendingCopies) -> tuple[list[int], list[int]]:
        """Forget the copies that a plan carried out, unless they were cancelled meanwhile.

        Returns:
            Host blocks that need not be kept any more, and device blocks that lost a pin.
        """
        for copy in carried_out.swap_out:
            if self._out.get(copy.target) is copy:
                del self._out[copy.target]
        done = {id(copy) for copy in (*carried_out.swap_in, *carried_out.copies)}
        host_blocks: list[int] = []
        for request_id, copies in [*self._in.items()]:
            if id(copies[0]) in done:
                del self._in[request_id]
                host_blocks += [copy.source for copy in copies]
        sources = []
        for copy in [*self._copies.values()]:
            if id(copy) in done:
                del self._copies[copy.target]
                self._unpin(copy.source)
                sources.append(copy.source)
        return host_blocks, sources

    def _unpin(self, block_id: int) -> None:
        self._pins[block_id] -= 1
        if not self._pins[block_id]:
            del self._pins[block_id]
