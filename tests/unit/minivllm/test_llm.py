"""`LLM`: vLLM's offline interface, in order, all or nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from minivllm import LLM, SamplingParams
from minivllm.errors import BadParameter, ConfigError, RequestError, UnsupportedError

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_llama: str) -> LLM:
    return LLM(model=tiny_llama, num_kv_blocks=64, max_num_seqs=2)


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [{"prompt_token_ids": [i, i + 1]} for i in range(5, 17)]
    outputs = llm.generate(prompts, GREEDY)
    assert [o.prompt_token_ids for o in outputs] == [(i, i + 1) for i in range(5, 17)]
    assert all(len(o.outputs[0].token_ids) == 5 for o in outputs)


def test_one_prompt_needs_no_list(llm: LLM) -> None:
    [output] = llm.generate("The red boat", GREEDY)
    assert output.prompt == "The red boat"
    assert output.finished


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    outputs = llm.generate(["a", "b"], [SamplingParams(max_tokens=2, ignore_eos=True), GREEDY])
    assert [len(o.outputs[0].token_ids) for o in outputs] == [2, 5]
    with pytest.raises(BadParameter, match="2 prompts need as many"):
        llm.generate(["a", "b"], [GREEDY])


def test_a_refused_prompt_leaves_none_running(llm: LLM) -> None:
    with pytest.raises(BadParameter, match="empty"):
        llm.generate([{"prompt_token_ids": [5]}, {"prompt_token_ids": []}], GREEDY)
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.pool_counts().in_use == 0


def test_leaving_a_stream_early_aborts_the_rest(llm: LLM) -> None:
    stream = llm.stream(["a", "b"], GREEDY)
    next(stream)
    stream.close()  # type: ignore[attr-defined]  # a generator
    assert not llm.engine.has_unfinished_requests()


def test_leaving_a_stream_with_ended_requests_unread_raises_nothing(llm: LLM) -> None:
    stream = llm.stream([{"prompt_token_ids": [5]}, {"prompt_token_ids": [6]}], GREEDY)
    next(output for output in stream if output.finished)  # the other ended in the same step
    stream.close()
    assert not llm.engine.has_unfinished_requests()


def test_two_streams_read_in_turn_each_get_their_own_outputs(llm: LLM) -> None:
    prompts = [{"prompt_token_ids": [i, 9]} for i in (5, 6)]
    alone = [llm.generate(prompt, GREEDY)[0].outputs for prompt in prompts]
    streams = [llm.stream(prompt, GREEDY) for prompt in prompts]
    first = next(streams[0])
    second = list(streams[1])  # runs the first stream's request to its end, too
    rest = list(streams[0])
    assert [o.prompt_token_ids for o in (first, *rest)] == [(5, 9)] * 5
    assert [o.prompt_token_ids for o in second] == [(6, 9)] * 5
    assert [rest[-1].outputs, second[-1].outputs] == alone


def test_requests_added_to_the_engine_directly_are_not_driven_past_their_owner(llm: LLM) -> None:
    llm.engine.add_request("mine", {"prompt_token_ids": [5]}, GREEDY)
    with pytest.raises(RequestError, match="added to it directly"):
        llm.generate("The red boat", GREEDY)
    llm.engine.abort_request("mine")
    assert len(llm.generate("The red boat", GREEDY)) == 1


def test_arguments_of_another_type_are_refused_by_name(llm: LLM) -> None:
    with pytest.raises(BadParameter, match="list of prompts"):
        llm.generate(None, GREEDY)  # type: ignore[arg-type]  # wrong on purpose
    for wrong in ({"max_tokens": 3}, 5, [None]):
        with pytest.raises(BadParameter, match="sampling_params must be"):
            llm.generate("a", wrong)  # type: ignore[arg-type]  # wrong on purpose
    for talk in ({"role": "user", "content": "x"}, "hello", [3], [{1: 2}.keys()]):
        with pytest.raises(BadParameter, match="list of messages"):
            llm.chat(talk)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(BadParameter, match="template refuses"):
        llm.chat([{"role": "user", "content": "x"}], chat_template="{{ 1 / 0 }}")
    assert len(llm.generate((p for p in ("a", "b")), GREEDY)) == 2  # type: ignore[arg-type]  # any iterable will do


def test_chat_uses_the_template_for_one_conversation_or_many(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "Where is the boat?"}]
    [one] = llm.chat(conversation, GREEDY)
    many = llm.chat([conversation, conversation], GREEDY)
    assert [o.outputs[0].token_ids for o in many] == [one.outputs[0].token_ids] * 2
    assert one.prompt_token_ids.count(440) == 1  # one BOS
    with pytest.raises(BadParameter, match="at least one message"):
        llm.chat([], GREEDY)


def test_a_model_without_a_tokenizer_takes_ids_only(tiny_llama: str, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(Path(tiny_llama) / name)
    llm = LLM(model=str(tmp_path), num_kv_blocks=16)
    [output] = llm.generate({"prompt_token_ids": [5, 6]}, GREEDY)
    assert len(output.outputs[0].token_ids) == 5
    with pytest.raises(UnsupportedError, match="no tokenizer"):
        llm.generate("text", GREEDY)
    with pytest.raises(UnsupportedError, match="no tokenizer"):
        llm.chat([{"role": "user", "content": "hi"}], GREEDY)


def test_an_unknown_option_is_refused(tiny_llama: str) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        LLM(model=tiny_llama, tensor_parallel_size=2)
