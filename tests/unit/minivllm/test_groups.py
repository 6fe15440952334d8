"""Which ids belong together, and how long they are taken."""

from __future__ import annotations

import pytest

from minivllm.errors import DuplicateRequest
from minivllm.groups import SequenceGroups, forks_when_it_samples, make_child
from minivllm.request import Request, RequestStatus, SamplingParams, sequence_ids


def request(name: str, n: int = 3) -> Request:
    return Request(name, [1, 2], 2, SamplingParams(n=n))


def test_a_request_forks_only_before_its_first_token_and_only_with_n_above_1() -> None:
    parent = request("a")
    assert forks_when_it_samples(parent)
    assert not forks_when_it_samples(request("b", n=1))
    child = make_child(parent, 1)
    assert not forks_when_it_samples(child)
    parent.token_ids.append(3)
    assert not forks_when_it_samples(parent)


def test_a_child_has_its_parent_s_history_and_facts_but_a_life_of_its_own() -> None:
    parent = request("a")
    parent.status, parent.num_computed_tokens = RequestStatus.RUNNING, 2
    parent.num_cached_tokens, parent.num_preemptions, parent.seed = 1, 5, 7
    child = make_child(parent, 2)
    assert (child.request_id, child.parent_id, child.sequence_index) == ("a/2", "a", 2)
    assert (child.status, child.num_computed_tokens) == (RequestStatus.RUNNING, 2)
    assert (child.num_cached_tokens, child.num_preemptions, child.seed) == (1, 0, 7)
    assert child.sampling is parent.sampling
    child.token_ids.append(9)
    assert parent.token_ids == [1, 2]


def test_all_ids_of_a_group_are_taken_until_its_last_sequence_leaves() -> None:
    groups = SequenceGroups()
    groups.open(parent := request("a"))
    groups.join(make_child(parent, 1))
    groups.leave("a")
    for name in sequence_ids("a", 3):
        with pytest.raises(DuplicateRequest, match=f"request id '{name}' is in use"):
            groups.refuse_taken(request(name, n=1), {})
    groups.leave("a/1")
    for name in sequence_ids("a", 3):
        groups.refuse_taken(request(name, n=1), {})


def test_a_new_group_is_refused_for_any_of_its_ids() -> None:
    groups = SequenceGroups()
    with pytest.raises(DuplicateRequest, match="'a/2'"):
        groups.refuse_taken(request("a"), {"a/2"})
    groups.open(request("b/1", n=2))
    with pytest.raises(DuplicateRequest, match="'b/1'"):
        groups.refuse_taken(request("b"), {})


def test_a_group_is_known_by_its_first_id_alone() -> None:
    groups = SequenceGroups()
    groups.open(parent := request("a"))
    groups.join(child := make_child(parent, 1))
    assert groups.all_of("a") == (parent, [parent, child])
    assert groups.all_of("a/1") is None
    assert groups.all_of("b") is None
    groups.leave("a")
    assert groups.all_of("a") == (parent, [child])
    groups.leave("a/1")
    assert groups.all_of("a") is None


def test_a_request_for_one_sequence_is_in_no_group() -> None:
    groups = SequenceGroups()
    groups.open(request("a", n=1))
    assert groups.all_of("a") is None
    groups.leave("a")
    groups.refuse_taken(request("a"), {})
