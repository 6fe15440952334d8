"""stages_within_band: what goes on inside the engine is what goes on inside the reference.

Needs a traced golden and an engine that captures stages. Where tokens and logits agree, this tells
no more; where they do not, it names the first stage that is wrong.
"""

from __future__ import annotations

from typing import Any

from conformance import triage  # which asks the checks' cases, so: by name, when used
from conformance.checks.case import Case, CheckInputError
from conformance.verdicts import Finding, Verdict

__all__ = ["stages_within_band"]

CHECK = "stages_within_band"


def stages_within_band(case: Case, args: Any) -> list[Finding]:
    """None, a request name, or a list of them: compare every stage the golden holds."""
    if not case.has("stages"):
        return [Finding(Verdict.SKIP, CHECK, None, case.why_missing("stages"))]
    return [_judge(case, name) for name in case.golden_requests(args)]


def _judge(case: Case, name: str) -> Finding:
    run = case.run_of(name)
    record = case.golden(run)
    wanted = triage.ordered_stages(record.stages)
    if not wanted:
        raise CheckInputError(f"the golden of {name!r} holds no stages: record it with traced: true")
    output = case.output(CHECK, run)
    if output.prompt_token_ids is not None and tuple(output.prompt_token_ids) != record.prompt_token_ids:
        return case.fail(
            CHECK, name, "stage prompt ids: they differ from the golden's; nothing later is judged"
        )
    sizes: dict[str, float] = {}
    for stage in wanted:
        if stage not in run.stages:
            continue
        found = triage.stage_error(stage, run, record)
        if isinstance(found, triage.Suspect):
            return case.fail(
                CHECK, name, found.text, size=found.size, saw="logits", detail={"stage": stage, **sizes}
            )
        sizes[stage] = found
    if not sizes:
        raise CheckInputError(f"no stage of {name!r} was captured")
    missing = [stage for stage in wanted if stage not in sizes and stage not in ("pixels", "final")]
    worst = max(sizes, key=lambda stage: sizes[stage])
    told = f"{len(sizes)} stages inside their bands, {worst} at {sizes[worst]:.2g} × its yardstick"
    if missing:
        return Finding(Verdict.WEAK, CHECK, name, f"{told}; not captured: {', '.join(missing)}", saw="logits")
    return Finding(case.soften(Verdict.PASS), CHECK, name, told, saw="logits", detail=sizes)
