"""`LLM`: the offline interface. Names are vLLM's, so that a script can swap the import."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from minivllm.config import EngineConfig
from minivllm.engine import LLMEngine
from minivllm.errors import BadParameter, UnsupportedError
from minivllm.processor import Prompt
from minivllm.request import RequestOutput, SamplingParams

__all__ = ["LLM"]

Message = Mapping[str, Any]


class LLM:
    """Loads a model and generates from prompts or conversations.

    Args:
        model: a directory with config.json and safetensors, or a .gguf file.
        options: the other fields of `EngineConfig`; an unknown one is a ConfigError.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.engine = LLMEngine(EngineConfig.from_dict({"model": str(model), **options}))
        self._count = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generate from each prompt, all together; outputs come in the order of the prompts.

        Raises:
            RequestError, CapacityError: a prompt was refused; then none of them runs.
        """
        final = {o.request_id: o for o in self.stream(prompts, sampling_params) if o.finished}
        return [final[k] for k in sorted(final, key=int)]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Like `generate`, from one conversation or several, through the chat template."""
        return self.generate(
            self.chat_prompts(
                messages, chat_template=chat_template, add_generation_prompt=add_generation_prompt
            ),
            sampling_params,
        )

    def chat_prompts(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
    ) -> list[Prompt]:
        """Conversations as token-id prompts, one per conversation."""
        if self.engine.tokenizer is None:
            raise UnsupportedError("this model has no tokenizer, so it has no chat template")
        if not messages:
            raise BadParameter("chat needs at least one message, got none")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        return [
            {
                "prompt_token_ids": self.engine.tokenizer.encode_chat(
                    conversation,  # type: ignore[arg-type]  # narrowed by the isinstance above
                    chat_template=chat_template,
                    add_generation_prompt=add_generation_prompt,
                )
            }
            for conversation in conversations
        ]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Yield every output as it changes, of all prompts in turn; outputs are cumulative.

        Leaving the iterator early aborts what is still running.
        """
        if isinstance(prompts, str | Mapping):
            prompts = [prompts]
        many = _per_prompt(sampling_params, len(prompts))
        live: dict[str, int] = {}
        try:
            for prompt, params in zip(prompts, many, strict=True):
                request_id = str(self._count)
                self.engine.add_request(request_id, prompt, params)
                self._count += 1
                live[request_id] = len(live)
            while live:
                for output in self.engine.step():
                    if output.finished:
                        live.pop(output.request_id, None)
                    yield output
        finally:
            for request_id in live:
                self.engine.abort_request(request_id)


def _per_prompt(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if sampling_params is None:
        sampling_params = SamplingParams()
    if isinstance(sampling_params, SamplingParams):
        return [replace(sampling_params) for _ in range(count)]
    if len(sampling_params) != count:
        raise BadParameter(f"{count} prompts need as many sampling_params, got {len(sampling_params)}")
    return list(sampling_params)
