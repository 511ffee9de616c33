"""The receipt as a page for people: the answer first, then what it rests on."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from loadproof.judge.verdict import time_change, time_range
from loadproof.measure.controls import DEVICE_BIT, SERVED_BIT
from loadproof.measure.messages import Result
from loadproof.plan.schedule import ARMS
from loadproof.report.marks import MARKDOWN

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from loadproof.measure.legs import Leg
    from loadproof.report.marks import Marks
    from loadproof.report.receipt import Predicate, Statement

_MEANING = {
    "A": "baseline",
    "A'": "baseline again",
    "B": "candidate",
    "S": "baseline with a planted delay",
}
_MIB = 1 << 20
TIME_HEADER = ("arm", "what", "median", "load time", "interval", "p of no difference")
SERVED_HEADER = ("by", "prompt tokens", "page cache", "load", "first", "in all", "served")
_TOKENS_SHOWN_MAX = 8
MEMORY_NOTE = (
    "Peaks over the timing legs, in MiB; pinned and device as the loader counts them. On the fake "
    "device both are shared memory of the process."
)
MEMORY_HEADER = ("arm", "anonymous", "shared", "file", "drop of MemAvailable", "pinned", "device")


def headline(predicate: Predicate) -> str:
    """Return the answer in one line: verdict, weights, controls and served output."""
    conclusion = predicate.conclusion
    parts = [conclusion.verdict.outcome, f"weights {conclusion.weights}"]
    for control in predicate.controls:
        fault = control.name.removeprefix("device-").replace("-", " ")
        if not control.found and control.name == SERVED_BIT:
            parts.append("a spoilt weight NOT seen in the served output")
        elif not control.found:
            parts.append(f"planted {fault} NOT blamed on its tensor alone")
        elif control.name == DEVICE_BIT:
            parts.append(f"planted {fault} blamed on its tensor")
    others = sum(each.found for each in predicate.controls if each.name != DEVICE_BIT)
    if others:
        parts.append(f"{others} other controls found")
    if conclusion.served != "not-run":
        parts.append(f"served output {conclusion.served}")
    return ", ".join(parts)


def render(statement: Statement) -> str:
    """Return the whole page as Markdown."""
    return "\n".join(_lines(statement)) + "\n"


def _lines(statement: Statement) -> Iterator[str]:
    predicate = statement.predicate
    conclusion, policy = predicate.conclusion, predicate.policy
    text, code = MARKDOWN.text, MARKDOWN.code
    yield f"# {text(headline(predicate))}\n"
    yield (
        f"Required: **{conclusion.requirement}**, and that is **{conclusion.answer}** "
        f"(exit status {predicate.exit_status}). Class of this receipt: "
        f"**{text(predicate.device_class)}**. It is {predicate.integrity}, not signed.\n"
    )
    yield from (f"- {code(each.code)}: {text(each.sentence)}" for each in conclusion.reasons)
    yield "\n## Time\n"
    yield from table(TIME_HEADER, time_rows(predicate))
    yield (
        f"\n{predicate.blocks} mirrored blocks, seed {predicate.seed}, policy {code(policy.name)} "
        f"(`{policy.digest()}`): margin {time_change(-policy.margin_log_ratio)}, planted delay "
        f"{policy.planted_delay_fraction:.0%}."
    )
    yield "\n## Weights and controls\n"
    yield from _weights(statement)
    yield "\n## Served output\n"
    yield from map(text, served_sentences(predicate))
    yield ""
    yield from table(SERVED_HEADER, served_rows(predicate))
    yield "\n## Memory\n"
    yield from table(MEMORY_HEADER, memory_rows(predicate))
    yield f"\n{MEMORY_NOTE}"
    yield "\n## What ran, and where\n"
    yield from (f"- {each}" for each in provenance(predicate, MARKDOWN))
    yield "\n## Not run\n"
    yield from (f"- {text(each.what)}: not run: {text(each.why)}." for each in predicate.not_run)


def table(header: Sequence[str], rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    yield "| " + " | ".join(header) + " |"
    yield "|" + " --- |" * len(header)
    for row in rows:
        yield "| " + " | ".join(map(MARKDOWN.text, row)) + " |"


def _results(legs: Sequence[Leg], arm: str) -> list[tuple[Leg, Result]]:
    return [
        (leg, leg.outcome)
        for leg in legs
        if leg.purpose == "time" and leg.arm == arm and isinstance(leg.outcome, Result)
    ]


def time_rows(predicate: Predicate) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the time table, one per arm, under ``TIME_HEADER``."""
    for arm in ARMS:
        times = [result.elapsed_s for _, result in _results(predicate.legs, arm)]
        median = f"{1000 * statistics.median(times):.1f} ms" if times else "not run"
        found = predicate.conclusion.verdict.contrasts.get(arm)
        if found is None:
            yield arm, _MEANING[arm], median, "", "", ""
        else:
            yield (
                arm,
                _MEANING[arm],
                median,
                time_change(found.estimate),
                f"{time_range(found)} ({found.confidence:.1%})",
                f"{found.p_sign_flip:.4f}",
            )


def served_sentences(predicate: Predicate) -> Iterator[str]:
    """Yield what the serve legs come to, one sentence each."""
    word = predicate.conclusion.served
    legs = [(leg, leg.outcome.served) for leg in predicate.legs if isinstance(leg.outcome, Result)]
    served = [each for leg, each in legs if leg.purpose == "serve" and each is not None]
    if not served:
        yield "Nothing was served; the reason is under what was not run."
        return
    meaning = {
        "equal": "A and B serve what transformers serves from the files",
        "differs": "An arm does not serve what transformers serves from the files",
        "not-run": "Not every arm served",
    }
    yield f"{meaning[word]}: {served[0].model}, {served[0].dtype}, {served[0].place}."
    for each in served[0].answers:
        if each.prompt_tokens < each.asked_tokens:
            yield (
                f"The prompt of {each.asked_tokens:,} tokens was cut to {each.prompt_tokens:,}, "
                "for which the model has positions."
            )


def served_rows(predicate: Predicate) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table of served output, one per prompt, under ``SERVED_HEADER``."""
    for leg in predicate.legs:
        if not isinstance(leg.outcome, Result) or leg.outcome.served is None:
            continue
        spoilt = ", spoilt" if leg.purpose == "serve-control" else ""
        for each in leg.outcome.served.answers:
            tokens = " ".join(map(str, each.tokens[:_TOKENS_SHOWN_MAX]))
            more = " …" if each.tokens[_TOKENS_SHOWN_MAX:] else ""
            outputs = ", ".join(f"{one.name} {one.sha256[:12]}…" for one in each.outputs)
            yield (
                leg.arm + spoilt,
                f"{each.prompt_tokens:,}",
                leg.cache.state,
                f"{leg.outcome.elapsed_s:.2f} s",
                f"{each.first_s:.3f} s",
                f"{each.seconds:.3f} s",
                tokens + more or outputs,
            )


def memory_rows(predicate: Predicate) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the memory table, one per arm, under ``MEMORY_HEADER``."""
    for arm in ARMS:
        pairs = _results(predicate.legs, arm)
        reports = [result.report or {} for _, result in pairs]
        yield (
            arm,
            _mib(leg.memory.process_anonymous_bytes for leg, _ in pairs),
            _mib(leg.memory.process_shmem_bytes for leg, _ in pairs),
            _mib(leg.memory.process_file_bytes for leg, _ in pairs),
            _mib(leg.memory.system_available_drop_bytes for leg, _ in pairs),
            _mib(report.get("pinned_bytes") for report in reports),
            _mib(report.get("device_bytes") for report in reports),
        )


def _mib(values: Iterator[int | None]) -> str:
    """Format the largest value; a figure that nobody gave is said to be absent."""
    known = [value for value in values if value is not None]
    return f"{max(known) / _MIB:.1f}" if known else "absent"


def _weights(statement: Statement) -> Iterator[str]:
    predicate, text, code = statement.predicate, MARKDOWN.text, MARKDOWN.code
    yield (
        f"{predicate.tensors} tensors, {predicate.checkpoint_bytes:,} bytes; digest of all: "
        f"`sha256:{statement.subject[0].digest.sha256}`."
    )
    yield from _audits(predicate)
    yield ""
    for each in predicate.weights:
        state = f"{len(each.differences)} tensors differ" if each.differences else "equal"
        hazards = f", {len(each.hazards)} hazards" if each.hazards else ""
        yield f"- Hash leg of {each.arm}: {state}{hazards}."
        yield from (
            f"  - {code(one.tensor)}: {text(one.sentence())}" for one in each.differences[:10]
        )
    for control in predicate.controls:
        blamed = "blamed " + (", ".join(map(code, control.blamed)) or "nothing")
        if control.name == SERVED_BIT:
            blamed = "changed the served output" if control.found else "changed nothing"
        planted = f"{text(control.planted)}, in {code(control.tensor)}"
        yield f"- Control {code(control.name)} ({planted}): {blamed}."
        yield from (f"  - seen: {text(each)}" for each in control.seen[:3])


def _audits(predicate: Predicate) -> Iterator[str]:
    read = [
        result.audited_bytes
        for arm in ARMS
        for _, result in _results(predicate.legs, arm)
        if result.audited_bytes is not None
    ]
    if read:
        yield (
            f"{len(read)} timing legs were read back after their clocks had stopped, each at "
            f"least {min(read):,} of {predicate.checkpoint_bytes:,} bytes."
        )


def provenance(predicate: Predicate, marks: Marks) -> Iterator[str]:
    """Yield what ran and where, one sentence each, in the marks of the page it is for."""
    yield from _arms(predicate, marks)
    yield from _environment(predicate, marks)


def _arms(predicate: Predicate, marks: Marks) -> Iterator[str]:
    text, code = marks.text, marks.code
    for name, arm in predicate.arms.items():
        options = ", ".join(f"{key}={value}" for key, value in arm.options.items()) or "none"
        whole = f"options {text(options)}, package {code(arm.digest)}."
        if arm.loader is not None:
            version = arm.loader.version or "of unknown version"
            yield (
                f"{text(name)}: loader {code(arm.loader.name)} "
                f"({text(arm.loader.distribution)} {text(version)}), {whole}"
            )
        if arm.revision is None:
            continue
        revision = arm.revision
        state = "with uncommitted changes" if revision.dirty else "clean"
        branch = f" on branch {code(revision.branch)}" if revision.branch else ""
        yield (
            f"{text(name)}: {code(revision.spoken)}{branch}, commit {code(revision.commit[:12])}, "
            f"{state}, {code(arm.entry or ' '.join(arm.command or ()))}, {whole}"
        )
        if revision.note:
            yield text(revision.note)


def _environment(predicate: Predicate, marks: Marks) -> Iterator[str]:
    environment, text = predicate.environment, marks.text
    if predicate.device is not None:
        major, minor = predicate.device.capability
        fake = " (fake)" if predicate.device.fake else ""
        name = text(predicate.device.name)
        yield f"Device: {name}{fake}, compute capability {major}.{minor}."
    cpu = environment.cpu or "unnamed processor"
    yield text(
        f"Machine: {environment.machine}, {cpu}, {environment.cpu_count} processors, "
        f"kernel {environment.kernel}, {environment.python}."
    )
    versions = (f"{name} {version or 'absent'}" for name, version in environment.packages.items())
    yield text(f"Packages: {', '.join(versions)}.")
    routes = predicate.conclusion.coverage.route_bytes.items()
    listed = ", ".join(f"{route} {count:,}" for route, count in routes) or "not reported"
    yield text(f"Bytes by route, candidate's timing legs: {listed}.")
