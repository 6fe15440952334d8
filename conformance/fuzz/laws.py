"""The laws a paged engine must keep, by name, and the error that says one is broken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, NoReturn

__all__ = ["LAWS", "Law", "LawBroken", "broken"]


class Law(NamedTuple):
    """`kind`: universal laws always count; declared ones by capability; "white box" is `check`."""

    kind: Literal["universal", "declared", "white box"]
    text: str


LAWS: Mapping[str, Law] = {
    "context": Law("universal", "every slot a request reads was computed, and holds its own prefix's KV"),
    "one write per slot": Law("universal", "no slot is written twice in one step with different content"),
    "positions": Law("universal", "positions of a row are contiguous and end where its context ends"),
    "a row computes": Law("universal", "a granted request has at least one token to compute"),
    "history": Law("universal", "the tokens to compute are the request's own, outputs included"),
    "table": Law("universal", "a table covers its tokens, holds no block twice and only blocks of the pool"),
    "conservation": Law("universal", "free blocks + distinct held blocks = pool, on the host too"),
    "refusal": Law("universal", "a refusal changes nothing"),
    "release": Law("universal", "a second release changes nothing"),
    "copies": Law("universal", "no copy of a list reads or writes what another one of it writes"),
    "solo": Law("universal", "a request generates what it would generate alone"),
    "one token": Law("universal", "at most one token per request and step, none from a partial chunk"),
    "end": Law("universal", "a request ends exactly at EOS, a stop token or its limit"),
    "budget": Law("universal", "no step exceeds its budget of tokens or of rows"),
    "progress": Law("universal", "a bounded number of steps leads to an empty engine"),
    "leak": Law("universal", "an empty engine has every block free"),
    "same twice": Law("universal", "the same operations happen in the same way"),
    "no crash": Law("universal", "no operation within the contract raises"),
    "retention": Law("declared", "a published block can be hit until it is handed out again"),
    "publish point": Law("declared", "nothing is hit before it is published"),
    "eviction order": Law("declared", "no cached block outlives its parent"),
    "single writer": Law("declared", "a block that is written has one owner"),
    "admission": Law("declared", "a grant whose blocks are free is not refused"),
    "purity": Law("declared", "a question changes nothing and is answered as asked"),
    "never fits": Law("declared", "what could outgrow the pool is rejected, everything else is not"),
    "order": Law("declared", "nobody starts before an earlier arrival"),
    "encoder": Law(
        "declared", "what a step needs is encoded, what is encoded is needed, and all fits the budget"
    ),
    "chunking": Law("declared", "with chunked prefill off, a prompt is computed in one step"),
    "white box": Law("white box", "the target's own check finds nothing"),
}


class LawBroken(AssertionError):
    """The target under test broke a law; `law` is a key of `LAWS`."""

    def __init__(self, law: str, detail: str) -> None:
        super().__init__(f"law {law!r} is broken ({LAWS[law].text}): {detail}")
        self.law = law
        self.detail = detail


def broken(law: str, detail: str) -> NoReturn:
    """Raise LawBroken."""
    raise LawBroken(law, detail)
