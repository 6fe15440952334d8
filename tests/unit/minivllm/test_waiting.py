"""The queue of waiting requests."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from minivllm.waiting import WaitingQueue


def test_the_smallest_ticket_is_served_first_whatever_the_order_of_arrival() -> None:
    queue = WaitingQueue()
    for ticket, name in (((2,), "c"), ((0, 5), "b"), ((0, 1), "a")):
        queue.push(ticket, name)
    assert [queue.pop() for _ in range(3)] == ["a", "b", "c"]


def test_a_request_put_back_with_its_old_ticket_is_first_again() -> None:
    queue = WaitingQueue()
    for number in range(3):
        queue.push((number,), f"r{number}")
    queue.pop()
    queue.push((0,), "r0")
    assert queue.first() == "r0"


def test_a_removed_request_is_not_served_wherever_it_stood() -> None:
    queue = WaitingQueue()
    for number in range(5):
        queue.push((number,), f"r{number}")
    for name in ("r0", "r2", "r4"):
        queue.remove(name)
        assert name not in queue
    assert len(queue) == 2
    assert [queue.pop(), queue.pop()] == ["r1", "r3"]
    assert queue.first() is None


def test_an_id_used_again_is_served_by_its_new_ticket() -> None:
    queue = WaitingQueue()
    for number in range(4):
        queue.push((number,), f"r{number}")
    queue.remove("r1")
    queue.push((9,), "r1")
    assert [queue.pop() for _ in range(4)] == ["r0", "r2", "r3", "r1"]


def test_removed_requests_do_not_pile_up_behind_a_first_one_that_stays() -> None:
    queue = WaitingQueue()
    queue.push((0,), "stays")
    for number in range(1, 2000):
        queue.push((number,), f"r{number}")
        queue.remove(f"r{number}")
    assert len(queue._heap) <= 2
    assert queue.first() == "stays"


@given(st.lists(st.tuples(st.sampled_from(["push", "pop", "remove"]), st.integers(0, 9)), max_size=60))
def test_the_queue_agrees_with_a_sorted_list(uses: list[tuple[str, int]]) -> None:
    queue, model = WaitingQueue(), dict[str, tuple[int, ...]]()
    for count, (use, number) in enumerate(uses):
        name = f"r{number}"
        if use == "push" and name not in model:
            model[name] = (number % 3, count)
            queue.push(model[name], name)
        elif use == "pop" and model:
            expected = min(model, key=lambda n: model[n])
            assert queue.pop() == expected
            del model[expected]
        elif use == "remove" and name in model:
            queue.remove(name)
            del model[name]
        assert len(queue) == len(model)
        assert all((name in queue) == (name in model) for name in (f"r{i}" for i in range(10)))
        assert queue.first() == min(model, key=lambda n: model[n], default=None)
