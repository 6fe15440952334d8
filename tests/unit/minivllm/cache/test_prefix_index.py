"""What identifies a block, and how it is found."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.cache import PrefixIndex, prefix_index
from minivllm.cache.prefix_index import BlockContent, Tag, block_key, root_key, same_content
from minivllm.errors import InvariantError
from minivllm.request import MediaSpan, Request, SamplingParams

ROOT = root_key(0)


def request(
    token_ids: Sequence[int], *, salt: str | None = None, media: Sequence[MediaSpan] = (), name: str = "r"
) -> Request:
    return Request(
        name, list(token_ids), len(token_ids), SamplingParams(), cache_salt=salt, media=tuple(media)
    )


def image(start: int, length: int, content_hash: str) -> MediaSpan:
    return MediaSpan(start, length, "image", content_hash)


def keys(req: Request, block_size: int = 4, seed: int = 0) -> list[bytes]:
    index = PrefixIndex(block_size, seed)
    chain = index.chain(req)
    return [chain.content(i).key for i in range(req.num_tokens // block_size)]


def publish(index: PrefixIndex, req: Request, block_ids: Sequence[int]) -> None:
    chain = index.chain(req)
    for position, block_id in enumerate(block_ids):
        index.publish(block_id, chain, position)
    index.check_integrity()


def found(index: PrefixIndex, req: Request) -> tuple[int, ...]:
    return index.match(index.chain(req), req.num_tokens // index.block_size)


# --- keys ----------------------------------------------------------------------------------------

TAGS = st.tuples(st.sampled_from(["salt", "adapter", "embeds", "media"]), st.text(max_size=3) | st.integers())
PARTS = st.tuples(
    st.binary(max_size=3), st.lists(st.integers(0, 2), max_size=3), st.lists(TAGS, max_size=2).map(tuple)
)


@given(PARTS, PARTS)
def test_two_keys_are_equal_only_if_all_their_parts_are(
    one: tuple[bytes, list[int], tuple[Tag, ...]], other: tuple[bytes, list[int], tuple[Tag, ...]]
) -> None:
    assert (block_key(*one) == block_key(*other)) == (one == other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([("adapter", "x")], [("salt", "x")]),
        ([("salt", "ab"), ("adapter", "c")], [("salt", "a"), ("adapter", "bc")]),
        ([("salt", "1")], [("salt", 1)]),
        ([("salt", "")], []),
        ([("embeds", "x"), ("embeds", "y")], [("embeds", "x", "embeds", "y")]),
        ([("salt", "\ud800")], [("salt", "?")]),
    ],
)
def test_parts_of_different_origin_never_run_into_each_other(one: list[Tag], other: list[Tag]) -> None:
    assert block_key(ROOT, (1, 2), one) != block_key(ROOT, (1, 2), other)


def test_the_key_of_a_given_seed_is_a_fixed_value_so_that_files_and_processes_agree() -> None:
    key = block_key(root_key(7), (1, 2, 3), [("salt", "tenant"), ("media", "abc", 0, 1, 2)])
    assert key.hex() == "7fb2d35e7c07f0f86ebf188cc49c0d6f79540bee66dfd3028e6597a1cbcfc8d9"


def test_the_root_is_random_without_a_seed_and_fixed_with_one() -> None:
    assert root_key(None) != root_key(None)
    assert root_key(3) == root_key(3)
    assert root_key(3) != root_key(4)
    assert keys(request([1, 2, 3, 4]), seed=1) != keys(request([1, 2, 3, 4]), seed=2)


def test_a_change_of_one_token_changes_its_block_and_all_later_ones_only() -> None:
    one, other = keys(request([1] * 12)), keys(request([1] * 5 + [2] + [1] * 6))
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, False, False]


def test_a_salt_changes_every_block_although_only_the_first_carries_it() -> None:
    index = PrefixIndex(2, 0)
    chain = index.chain(request([1, 1, 1, 1], salt="a"))
    assert chain.content(0).tags == (("salt", "a"),)
    assert chain.content(1).tags == ()
    plain, salted, other = (keys(request([1, 1, 1, 1], salt=salt), 2) for salt in (None, "a", "b"))
    assert len({*plain, *salted, *other}) == 6


def test_a_block_is_tagged_with_the_rows_of_each_image_it_overlaps() -> None:
    chain = PrefixIndex(4, 0).chain(
        request([9] * 16, media=[image(2, 5, "a"), image(7, 1, "b"), image(12, 2, "c")])
    )
    assert [chain.content(i).tags for i in range(4)] == [
        (("media", "a", 0, 2, 2),),
        (("media", "a", 2, 0, 3), ("media", "b", 0, 3, 1)),
        (),
        (("media", "c", 0, 0, 2),),
    ]


def test_a_run_of_an_image_is_tagged_by_the_rows_it_takes() -> None:
    runs = [MediaSpan(1, 2, "video", "v", 0), MediaSpan(4, 4, "video", "v", 2)]
    chain = PrefixIndex(4, 0).chain(request([9] * 8, media=runs))
    assert [chain.content(i).tags for i in range(2)] == [
        (("media", "v", 0, 1, 2),),
        (("media", "v", 2, 0, 4),),
    ]
    shifted = [runs[0], MediaSpan(4, 4, "video", "v", 3)]
    assert keys(request([9] * 8, media=runs))[0] == keys(request([9] * 8, media=shifted))[0]
    assert keys(request([9] * 8, media=runs))[1] != keys(request([9] * 8, media=shifted))[1]


def test_the_order_in_which_spans_are_given_does_not_matter() -> None:
    spans = [image(1, 2, "a"), image(4, 3, "b"), image(8, 4, "c")]
    assert keys(request([9] * 12, media=spans)) == keys(request([9] * 12, media=spans[::-1]))


def test_different_images_under_the_same_placeholders_have_different_keys() -> None:
    one, other = (keys(request([1, 9, 9, 1] * 2, media=[image(1, 2, name)])) for name in ("red", "blue"))
    assert not set(one) & set(other)


def test_two_images_that_meet_elsewhere_in_a_block_have_different_keys() -> None:
    # 5 + 3 against 6 + 2 placeholders: block 1 holds rows of both in both cases.
    one = keys(request([9] * 8, media=[image(0, 5, "a"), image(5, 3, "b")]))
    other = keys(request([9] * 8, media=[image(0, 6, "a"), image(6, 2, "b")]))
    assert one[0] == other[0]
    assert one[1] != other[1]


def test_a_placeholder_outside_of_a_span_is_not_a_row_of_it() -> None:
    one = keys(request([9] * 4, media=[image(0, 3, "a")]))
    other = keys(request([9] * 4, media=[image(0, 4, "a")]))
    assert one != other


def test_a_second_image_leaves_the_blocks_of_the_first_hittable() -> None:
    index = PrefixIndex(4, 0)
    publish(index, request([1, 9, 9, 1], media=[image(1, 2, "a")]), [5])
    both = request([1, 9, 9, 1, 9, 9, 9, 1], media=[image(1, 2, "a"), image(4, 3, "b")])
    assert found(index, both) == (5,)


def test_only_a_full_block_has_a_key() -> None:
    chain = PrefixIndex(4, 0).chain(request([1, 2, 3, 4, 5]))
    with pytest.raises(InvariantError, match="block 1 of request 'r' holds 1 of 4 tokens"):
        chain.content(1)


def test_a_chain_grows_with_the_generated_tokens() -> None:
    req = request([1, 2, 3])
    chain = PrefixIndex(2, 0).chain(req)
    first = chain.content(0)
    req.token_ids.append(4)
    assert chain.content(1).parent is first
    assert [chain.content(i).key for i in range(2)] == keys(request([1, 2, 3, 4]), 2)


# --- the index -----------------------------------------------------------------------------------


def test_a_forked_chain_shares_contents_and_then_goes_its_own_way() -> None:
    index = PrefixIndex(2, 0)
    media = (image(0, 3, "x"), image(5, 2, "y"))
    parent, child = request(range(8), media=media), request([*range(6), 9, 9], media=media)
    chain = index.chain(parent)
    contents = [chain.content(i) for i in range(4)]
    fork = chain.fork(child, 2)
    assert [fork.content(i) is contents[i] for i in range(4)] == [True, True, False, False]
    assert [fork.content(i).key for i in range(4)] == keys(child, 2)
    assert fork.content(2).key == contents[2].key
    assert fork.content(3).key != contents[3].key


def test_a_chain_forked_before_its_first_block_is_full_starts_at_the_same_root() -> None:
    parent, child = request([1]), request([1, 2])
    fork = PrefixIndex(2, 0).chain(parent).fork(child, 0)
    assert fork.content(0).key == block_key(ROOT, (1, 2), ())


def test_the_longest_published_prefix_is_found_up_to_the_limit() -> None:
    index = PrefixIndex(2, 0)
    publish(index, request([1, 2, 3, 4, 5, 6]), [7, 8, 9])
    assert found(index, request([1, 2, 3, 4, 5, 6, 7])) == (7, 8, 9)
    assert found(index, request([1, 2, 3, 4, 0, 6])) == (7, 8)
    assert found(index, request([0, 2, 3, 4, 5, 6])) == ()
    assert index.match(index.chain(request([1, 2, 3, 4])), 1) == (7,)


def test_a_removed_block_hides_its_children_and_shows_them_again_when_replaced() -> None:
    index = PrefixIndex(1, 0)
    publish(index, request([1, 2, 3]), [4, 5, 6])
    assert index.remove(5)
    assert found(index, request([1, 2, 3])) == (4,)
    again = index.chain(request([1, 2, 3]))
    index.publish(9, again, 1)
    index.check_integrity()
    assert found(index, request([1, 2, 3])) == (4, 9, 6)


def test_a_salted_prefix_is_found_only_with_its_salt() -> None:
    index = PrefixIndex(2, 0)
    publish(index, request([1, 2, 3, 4], salt="a"), [1, 2])
    assert found(index, request([1, 2, 3, 4], salt="a")) == (1, 2)
    for salt in (None, "b", ""):
        assert found(index, request([1, 2, 3, 4], salt=salt)) == ()


def test_twins_are_both_kept_and_the_older_one_is_found_while_it_lasts() -> None:
    index = PrefixIndex(2, 0)
    publish(index, request([1, 2]), [5])
    publish(index, request([1, 2]), [3])
    assert found(index, request([1, 2])) == (5,)
    index.remove(5)
    assert found(index, request([1, 2])) == (3,)
    index.remove(3)
    assert found(index, request([1, 2])) == ()
    assert len(index) == 0


def test_a_twin_shares_its_content_so_that_long_chains_are_compared_once() -> None:
    index = PrefixIndex(1, 0)
    publish(index, request([1, 2, 3]), [1, 2, 3])
    publish(index, request([1, 2, 3, 4]), [4, 5, 6, 7])
    assert index.content(6) is index.content(3)
    assert index.content(7).parent is index.content(3)


def test_publishing_a_block_twice_raises() -> None:
    index = PrefixIndex(2, 0)
    publish(index, request([1, 2]), [5])
    with pytest.raises(InvariantError, match="block 5 is published twice"):
        publish(index, request([3, 4]), [5])


def test_removing_an_unpublished_block_says_so() -> None:
    assert PrefixIndex(2, 0).remove(1) is False


def test_a_cleared_index_finds_nothing_and_can_be_filled_again() -> None:
    index = PrefixIndex(2, 0)
    publish(index, request([1, 2]), [5])
    index.clear()
    assert 5 not in index
    assert found(index, request([1, 2])) == ()
    publish(index, request([1, 2]), [5])
    assert found(index, request([1, 2])) == (5,)


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=6)


@given(st.lists(PROMPTS, max_size=6), PROMPTS, st.sampled_from([0, 1, 8]))
def test_even_with_colliding_keys_only_equal_prefixes_are_found(
    published: list[list[int]], wanted: list[int], bits: int
) -> None:
    def weak_key(parent_key: bytes, token_ids: Sequence[int], tags: Sequence[Tag]) -> bytes:
        return bytes([block_key(parent_key, token_ids, tags)[0] & ((1 << bits) - 1)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_index, "block_key", weak_key)
        index = PrefixIndex(1, 0)
        prefixes: dict[int, list[int]] = {}
        for prompt in published:
            block_ids = range(len(prefixes) + 1, len(prefixes) + 1 + len(prompt))
            publish(index, request(prompt), block_ids)
            prefixes.update({block_id: prompt[: i + 1] for i, block_id in enumerate(block_ids)})
        hit = found(index, request(wanted))
    assert [prefixes[block_id] for block_id in hit] == [wanted[: i + 1] for i in range(len(hit))]
    longest = max((n for n in range(len(wanted) + 1) if wanted[:n] in prefixes.values()), default=0)
    assert len(hit) == longest


def test_contents_differ_if_an_ancestor_does_even_when_their_own_tokens_agree() -> None:
    def content(parent: BlockContent | None, *token_ids: int) -> BlockContent:
        return BlockContent(parent, token_ids, (), b"same key")

    one, other = content(content(None, 1), 2), content(content(None, 0), 2)
    assert not same_content(one, other)
    assert same_content(one, content(content(None, 1), 2))
    assert not same_content(one, content(None, 2))
    assert not same_content(content(None, 2), one)


@pytest.mark.parametrize("damage", ["key", "block"])
def test_the_integrity_check_finds_an_entry_that_does_not_fit_its_block(damage: str) -> None:
    index = PrefixIndex(2, 0)
    publish(index, request([1, 2, 3, 4]), [1, 2])
    if damage == "key":
        stale = index.content(1)
        index._content[1] = BlockContent(None, (9, 9), (), stale.key)
        law = "a published block carries its key"
    else:
        del index._content[2]
        law = r"an index entry and its block name each other' is broken: \[2\]"
    with pytest.raises(InvariantError, match=law):
        index.check_integrity()
