"""The command line: `minivllm generate`, `minivllm info` and `minivllm bench`."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from minivllm import __version__
from minivllm.bench import add_parser as add_bench
from minivllm.build import resolve
from minivllm.config import EngineConfig
from minivllm.errors import MiniVLLMError
from minivllm.llm import LLM
from minivllm.models import load_model_config
from minivllm.request import SamplingParams

__all__ = ["main", "parser"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status.

    0 done, 1 a request failed, 2 refused or the output cannot be written, 130 interrupted, 141
    whoever read the output has gone.
    """
    arguments = parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that cannot show a character
    try:
        status = int(arguments.run(arguments))
        sys.stdout.flush()
        return status
    except MiniVLLMError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        _give_up_unwritable_output()
        if isinstance(error, BrokenPipeError):
            return 141
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _give_up_unwritable_output() -> None:
    """Drop what cannot be written, or Python would try again on leaving, and complain."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parser() -> argparse.ArgumentParser:
    """The command line: every command and option."""
    root = argparse.ArgumentParser(prog="minivllm", description=__doc__)
    root.add_argument("--version", action="version", version=__version__)
    commands = root.add_subparsers(required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="answer prompts, streaming the first answer")
    generate.add_argument("prompts", nargs="+", metavar="PROMPT")
    generate.add_argument(
        "--raw", action="store_true", help="complete the text as it is, without the chat template"
    )
    generate.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="picture before the text of each prompt; may be repeated. With --raw, the prompts hold the "
        "model's own placeholders",
    )
    generate.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    generate.add_argument("--top-p", type=float, default=1.0)
    generate.add_argument("--top-k", type=int, default=0)
    generate.add_argument("--max-tokens", type=int, default=256)
    generate.add_argument("--n", type=int, default=1, help="answers per prompt; needs a temperature")
    generate.add_argument("--stop", action="append", default=[], metavar="TEXT")
    generate.add_argument("--sampling-seed", type=int, help="seed of the requests")
    generate.add_argument("--json", action="store_true", help="print one JSON object per output instead")
    _add_engine_options(generate)
    generate.set_defaults(run=_generate)

    info = commands.add_parser("info", help="print the resolved configuration and why")
    _add_engine_options(info)
    info.set_defaults(run=_info)

    add_bench(commands)
    return root


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine", "the fields of minivllm.EngineConfig")
    types = typing.get_type_hints(EngineConfig)
    for field in fields(EngineConfig):
        flag = "--" + field.name.replace("_", "-")
        kind = _scalar(types[field.name])
        if field.name == "model":
            group.add_argument(flag, required=True, help="directory or .gguf file")
        elif kind is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=field.default)
        elif kind is dict:
            group.add_argument(flag, type=json_object, default=field.default, metavar="JSON")
        else:
            group.add_argument(flag, type=kind, default=field.default, help=f"default: {field.default}")


def json_object(text: str) -> dict[str, Any]:
    """A JSON object; anything else is an argparse error."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(text)
    return value


def _scalar(annotation: Any) -> type:
    """The scalar type of `int`, `int | None` or `Literal[...]`; dict for a mapping."""
    if isinstance(annotation, types.UnionType):
        annotation = next(a for a in typing.get_args(annotation) if a is not type(None))
    if typing.get_origin(annotation) is Mapping:
        return dict
    if typing.get_origin(annotation) is typing.Literal:
        annotation = type(typing.get_args(annotation)[0])
    assert isinstance(annotation, type)
    return annotation


def _engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    return {field.name: getattr(arguments, field.name) for field in fields(EngineConfig)}


def _generate(arguments: argparse.Namespace) -> int:
    params = SamplingParams(
        n=arguments.n,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        max_tokens=arguments.max_tokens,
        stop=arguments.stop,
        seed=arguments.sampling_seed,
    )
    llm = LLM(**_engine_options(arguments))
    tokenizer = llm.engine.tokenizer
    if arguments.raw or tokenizer is None or not tokenizer.has_chat_template:
        prompts: list[Any] = [_raw_prompt(text, arguments.image) for text in arguments.prompts]
    else:
        system = [{"role": "system", "content": arguments.system}] if arguments.system else []
        contents = [_content(text, arguments.image) for text in arguments.prompts]
        prompts = llm.chat_prompts([[*system, {"role": "user", "content": c}] for c in contents])

    final: dict[str, Any] = {}
    shown, first = 0, None
    for output in llm.stream(prompts, params):
        first = first or output.request_id
        text = output.outputs[0].text
        if output.request_id == first and not arguments.json:
            print(text[shown:], end="", flush=True)
            shown = len(text)
        if output.finished:
            final[output.request_id] = output
    ordered = [final[k] for k in sorted(final, key=int)]
    if arguments.json:
        for output in ordered:
            plain = asdict(output)
            plain.pop("stages")
            print(json.dumps(plain))
    else:
        print()
        for output in ordered:
            for completion in output.outputs:
                if output.request_id != first or completion.index:
                    sequence = f".{completion.index}" if len(output.outputs) > 1 else ""
                    print(f"\n[{output.request_id}{sequence}] {completion.text}")
    failed = [o for o in ordered if o.error]
    for output in failed:
        print(f"request {output.request_id} failed: {output.error}", file=sys.stderr)
    return 1 if failed else 0


def _raw_prompt(text: str, images: Sequence[str]) -> str | dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": list(images)}} if images else text


def _content(text: str, images: Sequence[str]) -> str | list[dict[str, str]]:
    """The user's turn: pictures, then text."""
    if not images:
        return text
    return [*({"type": "image", "image": path} for path in images), {"type": "text", "text": text}]


def _info(arguments: argparse.Namespace) -> int:
    config = EngineConfig(**_engine_options(arguments))
    plain = asdict(resolve(config, load_model_config(Path(config.model))))
    print(json.dumps(plain, indent=2, default=str))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
