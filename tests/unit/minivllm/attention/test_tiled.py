"""The tiled backend: a row's bits depend on its sequence alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from minivllm.attention import ATTENTION_BACKENDS, tiled
from minivllm.attention.tiled import KEY_TILE, MAX_ROWS, ROW_TILE, TiledBackend
from minivllm.layers.probe import threads

CPU = torch.device("cpu")
# bfloat16 products are slow on a cpu without them, so no large shape there.
SHAPES = [
    (torch.float32, 9, 3, 64),
    *((dtype, *shape) for dtype in KEY_TILE for shape in ((2, 1, 32), (6, 2, 16), (3, 3, 16))),
]


@pytest.fixture
def fresh_probe() -> Iterator[None]:
    """The probe remembers its answers; forget those of a doctored backend."""
    tiled._probe.cache_clear()
    yield
    tiled._probe.cache_clear()


def cancelling(w: Any) -> None:
    """Make keys equal and values opposite in pairs, so that results are rounding only."""
    for _, k, v in w.sequences:
        k[1::2] = k[: len(k) // 2 * 2 : 2]
        v[1::2] = -v[: len(v) // 2 * 2 : 2]


def chunks(length: int, size: int) -> list[list[tuple[int, int, int]]]:
    return [[(0, s, min(s + size, length))] for s in range(0, length, size)]


def test_rows_per_pass_are_whole_row_tiles() -> None:
    assert MAX_ROWS % ROW_TILE == 0


@pytest.mark.parametrize(("dtype", "heads", "kv_heads", "dim"), SHAPES)
def test_any_chunking_and_any_threads_give_the_same_bits(
    world: Any, dtype: torch.dtype, heads: int, kv_heads: int, dim: int
) -> None:
    length = KEY_TILE[dtype] + 50
    w = world([length], heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype)
    cancelling(w)
    with threads(1):
        expected = w.run("tiled", [[(0, 0, length)]])[0]
    for count in (1, 2):
        with threads(count):
            for size in (97, KEY_TILE[dtype]):
                assert torch.equal(w.run("tiled", chunks(length, size))[0], expected), (count, size)
            small = [(length - 60 + i, length - 60 + i + 5) for i in range(0, 60, 5)]
            steps = [[(0, 0, length - 60)], *[[(0, start, end)] for start, end in small]]
            assert torch.equal(w.run("tiled", steps)[0], expected), count


@pytest.mark.parametrize("dtype", list(KEY_TILE))
@pytest.mark.parametrize("window", [1, 5, 200, 515])
def test_any_chunking_gives_the_same_bits_under_a_window(world: Any, dtype: torch.dtype, window: int) -> None:
    """Windows that lie within a tile, across two, and that hide whole tiles; alone and in a batch."""
    tile = KEY_TILE[dtype]
    length = 2 * tile + 30
    w = world([length, 40], dtype=dtype, poison=True)
    cancelling(w)
    expected = w.run("tiled", [[(0, 0, length)], [(1, 0, 40)]], window=window)
    small = [[(0, i, i + 1), (1, i - length + 40, i - length + 41)] for i in range(length - 40, length)]
    for size in (97, tile):
        head = [[(0, s, min(s + size, length - 40))] for s in range(0, length - 40, size)]
        got = w.run("tiled", [*head, *small], window=window)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), size


@pytest.mark.parametrize(("dtype", "heads", "kv_heads", "dim"), SHAPES)
def test_a_prefill_row_has_the_bits_of_a_decode_row(
    world: Any, dtype: torch.dtype, heads: int, kv_heads: int, dim: int
) -> None:
    tile = KEY_TILE[dtype]
    w = world([tile + 20], heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype)
    cancelling(w)
    expected = w.run("tiled", [[(0, 0, tile + 20)]])[0]
    one_by_one = [[(0, i, i + 1)] for i in range(33)]
    around_the_tile = [[(0, i, i + 1)] for i in range(tile - 5, tile + 20)]
    got = w.run("tiled", [*one_by_one, [(0, 33, tile - 5)], *around_the_tile])[0]
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", list(KEY_TILE))
def test_batch_block_size_placement_and_poison_change_no_bit_across_tiles(
    world: Any, dtype: torch.dtype
) -> None:
    lengths = (KEY_TILE[dtype] + 9, 21, KEY_TILE[dtype])
    expected = world(lengths, dtype=dtype).run("tiled", [[(i, 0, n)] for i, n in enumerate(lengths)])
    steps = [[(i, 0, n - 1) for i, n in enumerate(lengths)], [(i, n - 1, n) for i, n in enumerate(lengths)]]
    for block_size in (1, 3, 256):
        w = world(lengths, dtype=dtype, block_size=block_size, shuffle=block_size, poison=True)
        got = w.run("tiled", steps)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), block_size


@pytest.mark.parametrize("dtype", list(KEY_TILE))
def test_decode_rows_computed_together_have_the_bits_they_have_alone(world: Any, dtype: torch.dtype) -> None:
    tile = KEY_TILE[dtype]
    lengths = (tile + 3, 2, tile, tile - 1, 40, 2 * tile + 1)
    w = world(lengths, dtype=dtype)
    cancelling(w)
    prefill = [[(i, 0, n - 1)] for i, n in enumerate(lengths)]
    last = [(i, n - 1, n) for i, n in enumerate(lengths)]
    for count in (1, 2):
        with threads(count):
            together = w.run("tiled", [*prefill, last])
            alone = w.run("tiled", [*prefill, *([one] for one in last)])
        assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))


def test_a_tile_of_hidden_keys_does_not_turn_minus_zero_into_zero(world: Any) -> None:
    # The second value underflows to -0; a whole prefill adds a second tile to it, a decode does not.
    w = world([193], heads=1, kv_heads=1)
    w.sequences[0][2][:] = 0.0
    w.sequences[0][2][1] = -1e-45
    whole = w.run("tiled", [[(0, 0, 193)]])[0]
    parts = w.run("tiled", [[(0, 0, 1)], [(0, 1, 2)], [(0, 2, 193)]])[0]
    assert torch.equal(whole.view(torch.int32), parts.view(torch.int32))


def test_the_scores_of_a_long_prompt_are_never_held_at_once(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = world([100])
    expected = w.run("tiled", [[(0, 0, 100)]])[0]
    monkeypatch.setattr(tiled, "MAX_ROWS", 16)
    rows = []
    real = tiled._attend_rows

    def spy(q: Tensor, *rest: Any) -> Tensor:
        rows.append(q.shape[1])
        return real(q, *rest)

    monkeypatch.setattr(tiled, "_attend_rows", spy)
    assert torch.equal(w.run("tiled", [[(0, 0, 100)]])[0], expected)
    assert rows == [16] * 6 + [4]


@pytest.mark.parametrize(
    ("dtype", "device", "reason"),
    [(torch.float32, "cuda", "cpu only, got device cuda"), (torch.float16, "cpu", "got torch.float16")],
)
def test_what_is_not_measured_is_not_supported(
    config: Any, dtype: torch.dtype, device: str, reason: str
) -> None:
    assert reason in str(TiledBackend.supports(config(), dtype, torch.device(device)))


@pytest.mark.usefixtures("fresh_probe")
@pytest.mark.parametrize(
    "fault",
    [
        lambda q, out: out + (q.shape[1] == 1),
        lambda q, out: out + (q.shape[1] % 4 == 3),
        lambda _, out: out + torch.get_num_threads() - 1,
    ],
    ids=["decode rows", "odd chunks", "threads"],
)
def test_the_probe_refuses_an_attention_that_depends_on_its_batch(
    monkeypatch: pytest.MonkeyPatch, config: Any, fault: Any
) -> None:
    real = tiled.tiled_attention
    monkeypatch.setattr(tiled, "tiled_attention", lambda q, *rest: fault(q, real(q, *rest)))
    with threads(2):
        reason = ATTENTION_BACKENDS.get("tiled").supports(config(), torch.float32, CPU)
    assert "depends on its chunk or on threads for 4 heads, 2 KV heads of 32, torch.float32" in str(reason)


@pytest.mark.usefixtures("fresh_probe")
def test_the_probe_sees_a_tile_that_is_too_long_for_the_blas_or_there_is_none(
    monkeypatch: pytest.MonkeyPatch, config: Any
) -> None:
    # One product over all keys, whatever their number: what the tiles exist to avoid.
    def untiled(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float) -> Tensor:
        query, key, value = (part.transpose(1, 2) for part in (q, k, v))
        key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
        scores = torch.matmul(query, key.transpose(2, 3)) * scale
        weights = torch.softmax(scores.masked_fill(hidden[:, None], float("-inf")), -1)
        return torch.matmul(weights, value).transpose(1, 2)

    monkeypatch.setattr(tiled, "tiled_attention", untiled)
    assert TiledBackend.supports(config(), torch.float32, CPU) is not None
