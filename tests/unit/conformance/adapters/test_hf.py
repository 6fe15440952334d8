"""Transformers as an engine: the same answer by cache, by forcing and by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from conformance.adapters import hf
from conformance.adapters.base import EngineOutput, EngineRequest, ModelSource, Stepped
from conformance.adapters.hf import HFAdapter, HFSdpaAdapter

PROMPT = (1, 20, 33, 47, 5)


@pytest.fixture(scope="module")
def adapter(tiny_checkpoint: Path) -> Iterator[HFAdapter]:
    with HFAdapter(ModelSource("tiny", tiny_checkpoint, "w"), {"dtype": "float32"}) as entered:
        yield entered


def ask(adapter: HFAdapter, forced: tuple[int, ...] | None = None, **sampling: Any) -> EngineOutput:
    values = {"temperature": 0.0, "max_tokens": 8, **sampling}
    [output] = adapter.generate([EngineRequest("r", values, PROMPT, forced_token_ids=forced)])
    return output


def rows(path: Path, ids: list[int]) -> torch.Tensor:
    model = transformers.LlamaForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits


def test_it_generates_greedily(adapter: HFAdapter, tiny_checkpoint: Path) -> None:
    output = ask(adapter, ignore_eos=True)
    assert output.error is None
    assert output.prompt_token_ids == PROMPT
    assert output.token_ids is not None
    assert len(output.token_ids) == 8
    logits = rows(tiny_checkpoint, [*PROMPT, *output.token_ids])
    assert tuple(logits[len(PROMPT) - 1 : -1].argmax(dim=-1).tolist()) == output.token_ids
    assert output.finish_reason == "length"


def test_forcing_takes_one_forward_pass_along_the_forced_ids(
    adapter: HFAdapter, tiny_checkpoint: Path
) -> None:
    output = ask(adapter, forced=(40, 41, 42), logprobs=4)
    assert output.token_ids == (40, 41, 42)
    logits = rows(tiny_checkpoint, [*PROMPT, 40, 41, 42])[len(PROMPT) - 1 : -1]
    assert output.choice_token_ids == tuple(logits.argmax(dim=-1).tolist())
    assert output.logprobs is not None
    expected = torch.log_softmax(logits, dim=-1)
    for row, told in zip(expected, output.logprobs, strict=True):
        for entry in told:
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-5)


def test_decoding_and_forcing_agree_on_logprobs(adapter: HFAdapter) -> None:
    free = ask(adapter, logprobs=5, ignore_eos=True)
    forced = ask(adapter, forced=free.token_ids, logprobs=5, ignore_eos=True)
    assert free.logprobs is not None
    assert forced.logprobs is not None
    for a, b in zip(free.logprobs, forced.logprobs, strict=True):
        assert [e.token_id for e in a] == [e.token_id for e in b]
        assert [e.logprob for e in a] == pytest.approx([e.logprob for e in b], abs=1e-4)


def test_a_token_outside_the_top_is_told_with_its_rank(adapter: HFAdapter) -> None:
    output = ask(adapter, forced=(40, 41), logprobs=1)
    assert output.logprobs is not None
    for row, token in zip(output.logprobs, (40, 41), strict=True):
        assert row[0].rank == 1
        assert token in {entry.token_id for entry in row}
        assert all(entry.rank is not None for entry in row)


def test_prompt_logprobs_have_one_entry_per_prompt_token(adapter: HFAdapter) -> None:
    output = ask(adapter, prompt_logprobs=2)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(PROMPT)
    assert output.prompt_logprobs[0] is None
    for entries, token in zip(output.prompt_logprobs[1:], PROMPT[1:], strict=True):
        assert entries is not None
        assert token in {entry.token_id for entry in entries}


def test_a_stop_token_ends_it_and_is_the_reason(adapter: HFAdapter) -> None:
    free = ask(adapter, ignore_eos=True).token_ids
    assert free is not None
    stop = free[2]
    output = ask(adapter, ignore_eos=True, stop_token_ids=[stop])
    assert output.token_ids == free[: free.index(stop) + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


def test_a_stop_string_cuts_the_text(adapter: HFAdapter) -> None:
    words = ask(adapter, ignore_eos=True).text.split()
    stop = words[2]
    output = ask(adapter, ignore_eos=True, stop=[stop])
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert stop not in output.text
    kept = ask(adapter, ignore_eos=True, stop=[stop], include_stop_str_in_output=True)
    assert kept.text.endswith(stop)


def test_text_and_chat_are_tokenized_by_the_models_own_tokenizer(adapter: HFAdapter) -> None:
    sampling = {"temperature": 0.0, "max_tokens": 1}
    text, chat = adapter.generate(
        [
            EngineRequest("t", sampling, text="w0 w1"),
            EngineRequest("c", sampling, chat=({"role": "user", "content": "w0"},)),
        ]
    )
    assert text.prompt_token_ids == (1, 5, 6)
    assert chat.prompt_token_ids == (1, 3, 5, 4)


@pytest.mark.parametrize("name", ["logit_bias", "min_tokens", "presence_penalty", "top_p"])
def test_what_it_does_not_serve_is_refused_by_name(adapter: HFAdapter, name: str) -> None:
    output = ask(adapter, **{name: 1})
    assert output.finished
    assert output.error is not None
    assert f"['{name}']" in output.error.message


def test_a_request_that_is_refused_does_not_stop_the_others(adapter: HFAdapter) -> None:
    good = EngineRequest("good", {"temperature": 0.0, "max_tokens": 2}, PROMPT)
    bad = EngineRequest("bad", {"temperature": 0.0, "max_tokens": 2}, ())
    first, second = adapter.generate([bad, good])
    assert first.error is not None
    assert second.error is None


def test_it_declares_what_it_offers_and_why_it_does_not_sample(adapter: HFAdapter) -> None:
    capabilities = adapter.capabilities()
    assert capabilities.engine == "hf"
    assert not isinstance(adapter, Stepped)
    assert "stepped" not in capabilities.features
    assert "sampling" in capabilities.missing


def test_sdpa_is_another_engine_with_nearly_the_same_numbers(
    adapter: HFAdapter, tiny_checkpoint: Path
) -> None:
    with HFSdpaAdapter(ModelSource("tiny", tiny_checkpoint, "w"), {"dtype": "float32"}) as sdpa:
        assert sdpa.capabilities().engine == "hf-sdpa"
        ours, theirs = (ask(a, forced=(40, 41), logprobs=3).logprobs for a in (adapter, sdpa))
    assert ours is not None
    assert theirs is not None
    for a, b in zip(ours, theirs, strict=True):
        assert [e.logprob for e in a] == pytest.approx([e.logprob for e in b], abs=1e-4)


def test_a_model_is_loaded_once_and_a_damaged_one_is_not_kept(tiny_checkpoint: Path) -> None:
    hf._models.clear()
    source = ModelSource("tiny", tiny_checkpoint, "w")
    with HFAdapter(source, {}) as one, HFAdapter(source, {}) as two:
        assert one._loaded is two._loaded
    hf._models.clear()
    with HFAdapter(ModelSource("tiny", tiny_checkpoint, "damaged-x"), {}):
        assert not hf._models


def test_it_runs_on_the_cpu_only(tiny_checkpoint: Path) -> None:
    adapter = HFAdapter(ModelSource("tiny", tiny_checkpoint, "w"), {"device": "cuda"})
    with pytest.raises(ValueError, match="cpu only"):
        adapter.__enter__()


def test_the_number_of_threads_is_an_option_and_is_given_back(tiny_checkpoint: Path) -> None:
    source, before = ModelSource("tiny", tiny_checkpoint, "w"), torch.get_num_threads()
    adapter = HFAdapter(source, {"threads": before + 1})
    assert "threads" in adapter.capabilities().options
    with adapter:
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    with pytest.raises(RuntimeError, match="positive"), HFAdapter(source, {"threads": 0}):
        pass
    assert torch.get_num_threads() == before


def test_it_must_be_entered_first(tiny_checkpoint: Path) -> None:
    with pytest.raises(RuntimeError, match="not entered"):
        ask(HFAdapter(ModelSource("tiny", tiny_checkpoint, "w"), {}))
