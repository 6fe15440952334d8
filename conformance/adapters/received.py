"""What an adapter answers, checked where it enters the harness.

Adapters are written by others. Lists for tuples and numbers of numpy are taken for what they mean;
anything else that the protocol does not allow is the adapter's mistake, and told as that.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from conformance.adapters.base import (
    FEATURES,
    Capabilities,
    EngineAdapter,
    EngineError,
    EngineOutput,
    ModelSource,
    PoolState,
    TokenLogprob,
)
from conformance.outside import FROM_OUTSIDE

__all__ = [
    "AdapterError",
    "declared",
    "received",
    "received_error",
    "received_events",
    "received_heads",
    "received_pool",
]


class AdapterError(TypeError):
    """An adapter answered something that `conformance.adapters.base` does not allow."""


def declared(
    factory: Callable[[ModelSource, Mapping[str, Any]], EngineAdapter],
    source: ModelSource,
    options: Mapping[str, Any],
) -> Capabilities:
    """What the engine says it can do.

    Raises:
        AdapterError: the adapter cannot be made, or says something else than its capabilities.
    """
    try:
        said: object = factory(source, options).capabilities()
    except FROM_OUTSIDE:
        raise
    except BaseException as error:  # code of others
        raise AdapterError(f"the adapter cannot tell its capabilities: {_told(error)}") from error
    if not isinstance(said, Capabilities):
        raise AdapterError(f"capabilities() must return Capabilities, got {said!r:.200}")
    features = frozenset(_texts("features", said.features))
    if unknown := sorted(features - set(FEATURES)):
        close = difflib.get_close_matches(unknown[0], FEATURES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise AdapterError(f"capabilities().features has no {', '.join(unknown)}{hint}")
    if not isinstance(said.missing, Mapping):
        raise AdapterError(f"capabilities().missing must map features to reasons, got {said.missing!r:.200}")
    return replace(
        said,
        engine=str(said.engine),
        version=str(said.version),
        dtypes=tuple(_texts("dtypes", said.dtypes)),
        features=features,
        options=frozenset(_texts("options", said.options)),
        missing={str(name): str(why) for name, why in said.missing.items()},
    )


def received_heads(value: object, known: Collection[str], where: str) -> dict[str, EngineOutput]:
    """Outputs by request, of which only id, text and whether they ended are checked.

    Args:
        known: the names of sequences that may be answered.
        where: the method that answered, for messages.

    Raises:
        AdapterError: not a list of `EngineOutput`, one for nobody, or two for one.
    """
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise AdapterError(f"{where} must return a list of EngineOutput, got {value!r:.200}")
    outputs: dict[str, EngineOutput] = {}
    for output in value:
        if not isinstance(output, EngineOutput):
            raise AdapterError(f"{where} must return a list of EngineOutput, got in it {output!r:.200}")
        name = output.request_id
        if name not in known:
            raise AdapterError(f"{where} answers {name!r}, which nobody asked; asked: {sorted(known)[:9]}")
        if name in outputs:
            raise AdapterError(f"{where} answers {name!r} twice")
        if not isinstance(output.text, str):
            raise AdapterError(f"{where}, {name}: text must be a string, got {output.text!r:.200}")
        if output.finished not in (True, False):
            raise AdapterError(
                f"{where}, {name}: finished must be true or false, got {output.finished!r:.200}"
            )
        outputs[name] = output
    return outputs


def received(value: object, known: Collection[str], where: str) -> dict[str, EngineOutput]:
    """Outputs by request, made of plain numbers and tuples.

    Raises:
        AdapterError: as `received_heads`, and for every field of another type.
    """
    return {
        name: _plain(output, f"{where}, {name}")
        for name, output in received_heads(value, known, where).items()
    }


def _plain(output: EngineOutput, where: str) -> EngineOutput:
    def ids(field: str) -> tuple[int, ...] | None:
        value = getattr(output, field)
        return None if value is None else tuple(number(field, one) for one in listed(field, value))

    def listed(field: str, value: object) -> list[Any]:
        if hasattr(value, "tolist"):
            value = value.tolist()
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
            raise AdapterError(f"{where}: {field} must be a list, got {value!r:.200}")
        return list(value)

    def number(field: str, value: object) -> int:
        try:
            if isinstance(value, bool):
                raise TypeError
            return operator.index(value)  # type: ignore[arg-type]  # that is what is tried
        except TypeError:
            raise AdapterError(f"{where}: {field} must hold integers, got {value!r:.200}") from None

    def entries(field: str, value: object) -> tuple[TokenLogprob, ...]:
        return tuple(entry(field, one) for one in listed(field, value))

    def entry(field: str, one: object) -> TokenLogprob:
        if not isinstance(one, TokenLogprob):
            raise AdapterError(f"{where}: {field} must hold lists of TokenLogprob, got {one!r:.200}")
        try:
            logprob = float(one.logprob)
        except (TypeError, ValueError):
            raise AdapterError(f"{where}: {field} has the logprob {one.logprob!r:.200}") from None
        rank = None if one.rank is None else number(field, one.rank)
        return TokenLogprob(number(field, one.token_id), logprob, rank)

    def positions(field: str) -> Any:
        value = getattr(output, field)
        if value is None:
            return None
        return tuple(None if one is None else entries(field, one) for one in listed(field, value))

    def optional(field: str) -> int | None:
        value = getattr(output, field)
        return None if value is None else number(field, value)

    received_error(output.error, f"{where}: error")
    if output.finish_reason is not None and not isinstance(output.finish_reason, str):
        raise AdapterError(f"{where}: finish_reason must be a text or None, got {output.finish_reason!r:.99}")
    logprobs = positions("logprobs")
    if logprobs is not None and None in logprobs:
        raise AdapterError(f"{where}: logprobs has no list for generated token {logprobs.index(None)}")
    stop = output.stop_reason
    return replace(
        output,
        finished=bool(output.finished),
        prompt_token_ids=ids("prompt_token_ids"),
        token_ids=ids("token_ids"),
        choice_token_ids=ids("choice_token_ids"),
        logprobs=logprobs,
        prompt_logprobs=positions("prompt_logprobs"),
        stop_reason=stop if stop is None or isinstance(stop, str) else number("stop_reason", stop),
        num_cached_tokens=optional("num_cached_tokens"),
        num_preemptions=optional("num_preemptions"),
    )


def received_error(value: object, where: str) -> EngineError | None:
    """Why a request was refused or failed, if it was.

    Raises:
        AdapterError: no `EngineError`, or one whose type and message are no texts.
    """
    if value is None:
        return None
    if isinstance(value, EngineError) and isinstance(value.type, str) and isinstance(value.message, str):
        return value
    raise AdapterError(f"{where} must be an EngineError of two texts, got {value!r:.200}")


def received_pool(value: object) -> PoolState:
    """How the block pool stands.

    Raises:
        AdapterError: no `PoolState`, or one that does not hold integers.
    """
    if not isinstance(value, PoolState):
        raise AdapterError(f"pool() must return a PoolState, got {value!r:.200}")
    try:
        return PoolState(*(operator.index(getattr(value, one.name)) for one in fields(PoolState)))
    except TypeError:
        raise AdapterError(f"pool() must tell integers, got {value!r:.200}") from None


def received_events(value: object) -> list[Mapping[str, Any]]:
    """Events as plain data, which reads the same from disk as from memory.

    Raises:
        AdapterError: not a list of mappings with a text under "event", or something in one is no number,
            text, list or mapping.
    """
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise AdapterError(f"drain_events() must return a list of mappings, got {value!r:.200}")
    return [_event(one) for one in value]


def _event(one: object) -> Mapping[str, Any]:
    if not isinstance(one, Mapping) or not isinstance(one.get("event"), str):
        raise AdapterError(f"drain_events(): an event must be a mapping with its name, got {one!r:.200}")

    def plain(value: object) -> object:
        if hasattr(value, "tolist"):
            value = value.tolist()
        if isinstance(value, Mapping):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        if value is None or isinstance(value, str | int | float):
            return value
        raise AdapterError(
            f"drain_events(), {one['event']}: {value!r:.200} is no number, text, list or mapping"
        )

    return {str(key): plain(item) for key, item in one.items()}


def _texts(field: str, value: object) -> list[str]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise AdapterError(f"capabilities().{field} must be a collection of names, got {value!r:.200}")
    names = list(value)
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise AdapterError(f"capabilities().{field} must hold names, got {wrong[0]!r:.200}")
    return names


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
