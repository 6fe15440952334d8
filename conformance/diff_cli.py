"""The command `conformance diff`: two engines, one prompt, no scenario needed.

Exit status: 0 they agree as far as could be seen, 1 they do not, 2 the command is wrong or an engine
cannot be asked.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from conformance.adapters.received import AdapterError
from conformance.canonical import CanonicalError
from conformance.direct import Comparison, Question, Side, compare
from conformance.engines import EngineNotFound, engine_names, find_engine
from conformance.models import ModelUnavailable, resolve_model
from conformance.output_files import OutputClash, must_be_writable, must_not_clash, output_path
from conformance.runner import Skipped
from conformance.terminal import Terminal, abridged, complain

__all__ = ["main", "parser", "print_comparison"]


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    args = parser().parse_args(argv)
    question = Question(
        args.prompt, args.chat, tuple(args.image), args.max_tokens, args.dtype, args.device or "auto"
    )
    try:
        must_not_clash({"--json": args.json}, args.image)
        must_be_writable(args.json)
        found = compare(
            question,
            find_engine(args.a),
            find_engine(args.b),
            resolve_model(args.model, args.data),
            args.data,
        )
        if args.json:
            args.json.write_text(json.dumps(found.as_dict(), indent=1), encoding="utf-8")
    except (
        AdapterError,
        CanonicalError,
        EngineNotFound,
        ModelUnavailable,
        OutputClash,
        Skipped,
        OSError,
    ) as error:
        complain(error)
        return 2
    print_comparison(Terminal(), found)
    return int(found.verdict.fails_run)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    root = argparse.ArgumentParser(prog="conformance diff", description=__doc__)
    engines = ", ".join(engine_names())
    root.add_argument("--a", default="hf", metavar="ENGINE", help=f"{engines}, or package.module:Class (hf)")
    root.add_argument("--b", default="minivllm", metavar="ENGINE", help="the other one (minivllm)")
    root.add_argument("--model", required=True, help="a name, a directory with config.json, or a .gguf file")
    root.add_argument("--prompt", required=True, help="the text")
    root.add_argument("--chat", action="store_true", help="the text is a message: use the chat template")
    root.add_argument(
        "--image", action="append", type=Path, default=[], metavar="FILE", help="may be repeated"
    )
    root.add_argument("--max-tokens", type=int, default=32, metavar="N")
    root.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    root.add_argument("--device", help="cpu, cuda, mps; what each engine chooses when left out")
    root.add_argument("--json", type=output_path, metavar="FILE", help="write everything as JSON")
    root.add_argument("--data", type=Path, metavar="DIR", help="directory with golden/ and scenarios/")
    return root


def print_comparison(console: Console, found: Comparison) -> None:
    """Verdict, then what matters first."""
    for side in (found.a, found.b):
        console.print(escape(_side(side)), soft_wrap=True)
    for line in found.lines:
        console.print(escape(abridged(line, "  ")), soft_wrap=True)
    if found.divergence is not None and not found.lines:
        console.print(escape(_divergence(found)), soft_wrap=True)
    if found.agreement is not None:
        one = found.agreement
        text = f"led along the answer of {found.a.engine}, {found.b.engine} chooses the same token at"
        console.print(f"{text} {one.agreed} of {one.positions} positions (by {one.how})", soft_wrap=True)
    console.print(f"truth: {escape(found.reference)}", soft_wrap=True)
    console.print(f"{found.verdict.value}: {escape(_last_word(found))}", soft_wrap=True)


def _side(side: Side) -> str:
    judged = "" if side.verdict is None else f" [{side.verdict.value}]"
    told = f"{side.engine} {side.version}{judged}: {abridged(side.error or repr(side.text), '  ')}"
    return "\n  ".join([told, *side.findings[:1], *([f"triage: {side.stage}"] if side.stage else [])])


def _divergence(found: Comparison) -> str:
    at = found.divergence
    assert at is not None
    ids = [(s.token_ids or ())[at : at + 1] for s in (found.a, found.b)]
    shown = " and ".join(str(one[0]) if one else "nothing" for one in ids)
    text = f"first divergence at generated position {at}: {shown}"
    if found.margin is None or found.band is None:
        return f"{text}; nothing tells how close the two are"
    inside = "inside" if found.margin <= found.band else "outside"
    return f"{text}; {found.margin:.4g} logits below the truth's best, {inside} the band of {found.band:.4g}"


def _last_word(found: Comparison) -> str:
    if found.lines:
        return "they were not given the same prompt, or one of them failed"
    judged = [side for side in (found.a, found.b) if side.verdict is not None]
    wrong = [side.engine for side in judged if side.verdict is not None and side.verdict.fails_run]
    if wrong:
        return f"{' and '.join(wrong)} disagree{'s' if len(wrong) == 1 else ''} with the reference"
    if not judged:
        same = found.divergence is None
        return (
            "the same tokens, and no yardstick for more" if same else "other tokens, and no yardstick for why"
        )
    return "both answer as the reference does" if found.divergence is None else "they differ by rounding only"
