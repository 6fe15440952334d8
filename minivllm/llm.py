"""`LLM`: the offline interface. Names are vLLM's, so that a script can swap the import."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from minivllm.config import EngineConfig
from minivllm.engine import LLMEngine
from minivllm.errors import BadParameter, RequestError
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
        self._inboxes: dict[str, deque[RequestOutput]] = {}  # of requests that streams wait for

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
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Like `generate`, from one conversation or several, through the chat template.

        Args:
            mm_processor_kwargs: settings of the image processor, for all conversations alike.
        """
        prompts = self.chat_prompts(
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        return self.generate(prompts, sampling_params)

    def chat_prompts(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Prompt]:
        """Conversations as prompts of token ids with their media, one per conversation.

        The content of a message is text, or a list of parts, see
        `minivllm.multimodal.split_conversation`.
        """
        given: object = messages
        if not isinstance(given, Sequence) or isinstance(given, str):
            raise BadParameter(f"chat takes a list of messages, or of such lists, got {given!r}")
        if not messages:
            raise BadParameter("chat needs at least one message, got none")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        return [
            self.engine.chat_prompt(
                conversation,  # type: ignore[arg-type]  # narrowed by the isinstance above
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                mm_processor_kwargs=mm_processor_kwargs,
            )
            for conversation in conversations
        ]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Yield every output as it changes, of all prompts in turn; outputs are cumulative.

        Several streams may be read in turn; their requests share the engine's steps. Leaving the
        iterator early aborts what is still running.

        Raises:
            RequestError, CapacityError: a prompt was refused; then none of them runs. Also when
                requests that were added to `engine` directly are unfinished: their outputs would
                be lost here.
        """
        prompts = _listed(prompts)
        many = _per_prompt(sampling_params, len(prompts))
        if self.engine.has_unfinished_requests() and not self._inboxes:
            raise RequestError(
                "the engine is serving requests that were added to it directly: finish or abort them first"
            )
        live: set[str] = set()
        inbox: deque[RequestOutput] = deque()
        try:
            for prompt, params in zip(prompts, many, strict=True):
                request_id = str(self._count)
                self.engine.add_request(request_id, prompt, params)
                self._count += 1
                live.add(request_id)
                self._inboxes[request_id] = inbox
            while live:
                if not inbox:
                    self._step()
                while inbox:
                    output = inbox.popleft()
                    if output.finished:
                        live.remove(output.request_id)
                    yield output
        finally:
            for request_id in live:
                if self._inboxes.pop(request_id, None) is not None:  # else it ended, unread
                    self.engine.abort_request(request_id)

    def _step(self) -> None:
        """One step for all streams; each finds its outputs in its inbox."""
        for output in self.engine.step():
            inbox = self._inboxes.get(output.request_id)
            if inbox is not None:
                inbox.append(output)
            if output.finished:
                self._inboxes.pop(output.request_id, None)


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise BadParameter(f"prompts must be a prompt or a list of prompts, got {prompts!r}")
    return list(prompts)


def _per_prompt(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if sampling_params is None:
        sampling_params = SamplingParams()
    if isinstance(sampling_params, SamplingParams):
        return [replace(sampling_params) for _ in range(count)]
    if not isinstance(sampling_params, Sequence):
        raise BadParameter(
            f"sampling_params must be SamplingParams or a list of them, got {sampling_params!r}"
        )
    if len(sampling_params) != count:
        raise BadParameter(f"{count} prompts need as many sampling_params, got {len(sampling_params)}")
    return list(sampling_params)
