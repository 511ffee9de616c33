"""Receipts: whole, strict, free of places, and never half written."""

from __future__ import annotations

import getpass
import json
import re
import socket
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from loadproof.errors import ReceiptError
from loadproof.judge.conclusion import conclude
from loadproof.measure.cache_state import CacheState
from loadproof.measure.conditions import Conditions
from loadproof.measure.controls import CONTROLS, Control
from loadproof.measure.digest import Difference, Manifest, TensorDigest
from loadproof.measure.environment import describe_environment
from loadproof.measure.gpu import GpuConditions
from loadproof.measure.legs import Leg, NotRun, WeightsCheck
from loadproof.measure.memory import MemoryPeaks
from loadproof.measure.messages import (
    Answer,
    DeviceFacts,
    Failure,
    LoaderIdentity,
    Result,
    Served,
    Serving,
)
from loadproof.measure.serve_legs import ServingPlan
from loadproof.measure.trial import Trial, TrialPlan
from loadproof.plan.arms import Arm, InstalledArm
from loadproof.plan.policy import load_policy
from loadproof.plan.revisions import Revision
from loadproof.plan.schedule import ARMS, mirrored_blocks
from loadproof.report.consistency import device_class
from loadproof.report.envelope import open_receipt
from loadproof.report.markdown import render
from loadproof.report.page import render_page
from loadproof.report.privacy import first_private_text, private_here, without_paths
from loadproof.report.receipt import (
    Statement,
    decode,
    encode,
    json_schema,
    make_receipt,
)

if TYPE_CHECKING:
    from collections.abc import Callable

SECONDS = {"A": 1.0, "A'": 1.001, "B": 1.0, "S": 1.2, "reference": 1.0}
FAKE = DeviceFacts(
    name="NVIDIA H200",
    fake=True,
    capability=(9, 0),
    integrated=False,
    host_page_tables=False,
    driver_version=13000,
)


def plan() -> TrialPlan:
    """A plan whose checkpoint and arms lie in this user's home."""
    revision = Revision(spoken="main", commit="c" * 40, tree="d" * 40, branch=None, dirty=False)
    arm = Arm(revision=revision, entry="weightload:load", digest="sha256:" + "a" * 64)
    smaller = msgspec.structs.replace(arm, options={"slot_count": 2})
    truth = TensorDigest(name="t", dtype="F32", shape=(2,), nbytes=8, sha256="b" * 64, crc32=1)
    return TrialPlan(
        policy=load_policy("rehearsal"),
        blocks=6,
        seed=7,
        device="fake",
        checkpoint=Path.home() / "model",
        shards=(Path.home() / "model" / "model.safetensors",),
        truth=Manifest((truth,)),
        baseline=InstalledArm(arm, str(Path.home() / "a")),
        candidate=InstalledArm(smaller, str(Path.home() / "b")),
    )


def leg(purpose: Any, arm: str, **changes: Any) -> Leg:
    """A leg with a result, or with the outcome given."""
    result = Result(
        elapsed_s=SECONDS[arm],
        phases_s={"load": SECONDS[arm]},
        tensors=1,
        nbytes=8,
        digest="sha256:" + "a" * 64,
        harness="sha256:" + "e" * 64,
        device=FAKE,
        report={"route_bytes": {"buffered": 8}, "pinned_bytes": 4096},
        device_to_host_copies=0,
        audited_bytes=8,
        read_bytes=0,
        vm_hwm_bytes=1,
    )
    values: dict[str, Any] = {"block": None, "half": None, "outcome": result} | changes
    cache = CacheState(state="warm", resident_bytes=8, total_bytes=8)
    memory = MemoryPeaks(samples=3, gap_max_s=0.02, process_rss_bytes=5 << 20)
    conditions = Conditions(
        memory_missing_bytes=0,
        waited_s=0.0,
        swapped_bytes=0,
        load_average=0.1,
        gpu=GpuConditions(absent={"clock_mhz_max": "the fake device has no NVML"}),
    )
    return Leg(
        purpose=purpose,
        arm=arm,
        cache=cache,
        **{"conditions": conditions, "memory": memory, **values},
    )


def trial() -> Trial:
    """A whole trial of equal arms."""
    truth = plan().truth.digest()
    weights = [WeightsCheck(arm=arm, manifest=truth, differences=(), hazards=()) for arm in "AABB"]
    found = [
        Control(name=name, planted="a fault", tensor="t", blamed=("t",), found=True)
        for name in CONTROLS
    ]
    timed = [
        leg("time", turn.arm, block=turn.block, half=turn.half)
        for turn in mirrored_blocks(ARMS, 6, 7)
    ]
    hashed = [leg("hash", arm) for arm in "AABB"]
    return Trial(legs=[*hashed, *timed], weights=weights, controls=found)


def receipt(seen: Trial | None = None) -> Statement:
    """Conclude and make a receipt."""
    seen = seen or trial()
    asked = plan()
    if any(each.purpose == "serve" for each in seen.legs):
        how = Serving(folder="model", prompts=(24,), new_tokens=2, seed=7, dtype="float32")
        serving = ServingPlan(reference=asked.baseline, serving=how, required=False)
        asked = msgspec.structs.replace(asked, serving=serving)
    return make_receipt(
        asked, seen, conclude(asked, seen, "no-regression"), describe_environment()
    )


def test_a_receipt_survives_the_round_trip_and_matches_its_schema() -> None:
    """What is written is read again unchanged, and the published schema accepts it."""
    made = receipt()
    text = encode(made)
    assert decode(text) == made
    jsonschema.validate(json.loads(text), json_schema())
    assert made.predicate.conclusion.answer == "proven"
    assert made.predicate.exit_status == 0
    assert "no-gain, weights equal, planted bit blamed on its tensor" in render(made)


@pytest.mark.parametrize(
    ("change", "answer", "status"),
    [
        (
            {"differences": (Difference("t", "bytes"),), "manifest": "f" * 64},
            "failed",
            4,
        ),
        ({"hazards": ("PIN-REUSE-BEFORE-COPY: x",)}, "failed", 4),
    ],
)
def test_wrong_weights_outrank_time(change: dict[str, Any], answer: str, status: int) -> None:
    """A differing tensor or a race in a hash leg fails the trial, named."""
    seen = trial()
    seen.weights[-1] = msgspec.structs.replace(seen.weights[-1], **change)
    _with(seen, 3, hazards=seen.weights[-1].hazards)
    made = receipt(seen)
    assert (made.predicate.conclusion.answer, made.predicate.exit_status) == (answer, status)
    first = made.predicate.conclusion.reasons[0]
    assert "Arm B" in first.sentence
    assert "'t'" in first.sentence or "PIN-REUSE" in first.sentence


def test_a_timing_leg_with_other_bytes_outranks_time() -> None:
    """A loader that is only right where it is hashed fails the trial, named."""
    seen = trial()
    _with(seen, 5, audit_wrong=("t",))
    conclusion = receipt(seen).predicate.conclusion
    assert (conclusion.answer, conclusion.weights) == ("failed", "differ")
    assert conclusion.reasons[0].code == "audit-failed"
    assert "'t'" in conclusion.reasons[0].sentence


def test_wrong_bytes_in_a_timing_leg_forbid_the_word_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader that is fast because it loads nothing has no gain, in any word or heading."""
    monkeypatch.setitem(SECONDS, "B", 0.8)
    assert render(receipt()).startswith("# gain")
    seen = trial()
    for number, each in enumerate(seen.legs):
        if (each.purpose, each.arm) == ("time", "B"):
            _with(seen, number, audit_wrong=("t",))
    made = receipt(seen)
    verdict = made.predicate.conclusion.verdict
    assert (verdict.outcome, verdict.sound) == ("inconclusive", False)
    assert [each.code for each in verdict.reasons] == ["audit-failed"]
    assert made.predicate.exit_status == 4
    assert render(made).startswith("# inconclusive")
    assert "<h1>inconclusive" in render_page(made)


def test_a_missed_control_outranks_time() -> None:
    """A planted bit that nobody was blamed for fails the trial."""
    seen = trial()
    seen.controls[0] = msgspec.structs.replace(seen.controls[0], blamed=(), found=False)
    made = receipt(seen)
    assert made.predicate.exit_status == 4
    assert made.predicate.conclusion.reasons[0].code == "control-missed"


def _with(seen: Trial, number: int, **changes: Any) -> None:
    """Change the outcome of one leg."""
    outcome = seen.legs[number].outcome
    changed = msgspec.structs.replace(outcome, **changes)
    seen.legs[number] = msgspec.structs.replace(seen.legs[number], outcome=changed)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"hazards": ("LEAK-AT-CLOSE: x",)}, "hazard"),
        ({"device_to_host_copies": 1}, "timed-read-back"),
        ({"audited_bytes": None}, "not-audited"),
        ({"nbytes": 7}, "bytes-missing"),
        ({"harness": "sha256:" + "0" * 64}, "harness-changed"),
        ({"device": msgspec.structs.replace(FAKE, driver_version=1)}, "device-changed"),
    ],
)
def test_what_a_timing_leg_shows_forbids_a_verdict(changes: dict[str, Any], code: str) -> None:
    """One leg that did something else is enough for inconclusive."""
    seen = trial()
    _with(seen, 5, **changes)
    made = receipt(seen)
    assert made.predicate.exit_status == 3
    assert code in {reason.code for reason in made.predicate.conclusion.reasons}


def test_a_hash_leg_on_another_device_leaves_no_class() -> None:
    """Weights that were checked elsewhere than they were timed speak of no hardware at all."""
    seen = trial()
    _with(seen, 0, device=msgspec.structs.replace(FAKE, fake=False))
    made = receipt(seen).predicate
    assert (made.device_class, made.exit_status) == ("unknown", 3)
    assert [each.code for each in made.conclusion.reasons] == ["device-changed"]


def test_a_trial_of_no_known_device_does_not_say_which_it_lacked() -> None:
    """Whether there was a GPU is not known where no leg got that far, or two disagree."""
    failed = Trial(legs=[leg("hash", "A", outcome=Failure("leg-killed", "It was killed."))])
    mixed = trial()
    _with(mixed, 0, device=msgspec.structs.replace(FAKE, fake=False))
    for seen, said in ((failed, "no leg came so far"), (mixed, "one and the same device")):
        made = receipt(seen).predicate
        assert made.device_class == "unknown"
        assert not any("no GPU" in each.why or "elsewhere" in each.why for each in made.not_run)
        (why,) = [each.why for each in made.not_run if each.what == "anything about a GPU"]
        assert said in why
    rehearsed = {each.what: each.why for each in receipt().predicate.not_run}
    assert rehearsed["time on a GPU"] == "no GPU: copies ran in host memory"
    assert "anything about a GB10" in rehearsed


def identities(baseline: LoaderIdentity, candidate: LoaderIdentity) -> Trial:
    """A trial of programs that say this of themselves."""
    seen = trial()
    for number, each in enumerate(seen.legs):
        _with(seen, number, identity=candidate if each.arm == "B" else baseline)
    return seen


def test_a_program_has_one_environment_in_a_trial_and_one_version_in_an_arm() -> None:
    """Another compiler, or a version that changes on the way, forbids a verdict."""
    one = LoaderIdentity(name="x", version="1", environment={"cuda": "13.0", "cc": "14"})
    newer = msgspec.structs.replace(one, version="2", environment={"cc": "14", "cuda": "13.0"})
    other = msgspec.structs.replace(newer, environment={"cuda": "12.9", "cc": "14"})
    mixed = identities(one, one)
    _with(mixed, 5, identity=newer)
    for seen, doubted in (
        (identities(one, newer), False),
        (identities(one, other), True),
        (mixed, True),
    ):
        codes = {reason.code for reason in receipt(seen).predicate.conclusion.reasons}
        assert ("environment-changed" in codes) == doubted


def test_legs_from_different_cache_states_are_inconclusive() -> None:
    """Warm and mixed legs in one trial cannot be compared."""
    seen = trial()
    cache = CacheState(state="mixed", resident_bytes=4, total_bytes=8)
    seen.legs[5] = msgspec.structs.replace(seen.legs[5], cache=cache)
    codes = {reason.code for reason in receipt(seen).predicate.conclusion.reasons}
    assert "cache-differs" in codes


def test_a_marked_leg_forbids_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leg outside the policy's band makes a trial that would say gain inconclusive."""
    monkeypatch.setitem(SECONDS, "B", 0.8)
    quiet = receipt(trial()).predicate.conclusion
    assert quiet.verdict.outcome == "gain"
    seen = trial()
    timed = seen.legs[-1]
    marked = msgspec.structs.replace(timed.conditions, marks=("it was hot",))
    seen.legs[-1] = msgspec.structs.replace(timed, conditions=marked)
    conclusion = receipt(seen).predicate.conclusion
    assert conclusion.verdict.outcome == "inconclusive"
    assert [each.code for each in conclusion.reasons] == ["conditions"]


def test_a_cold_start_that_is_not_proven_is_inconclusive() -> None:
    """Asked for cold, legs whose state is unknown cannot support it."""
    seen = trial()
    unknown = CacheState(state="unknown", resident_bytes=None, total_bytes=8, why="no proof")
    seen.legs = [msgspec.structs.replace(each, cache=unknown) for each in seen.legs]
    asked = msgspec.structs.replace(plan(), cache="cold")
    conclusion = conclude(asked, seen, "no-regression")
    assert [each.code for each in conclusion.reasons] == ["cache-unproven"]


@pytest.mark.parametrize(
    ("seconds", "word"), [(0.8, "gain"), (1.0, "no-gain"), (1.25, "regression")]
)
def test_equal_arms_neither_gain_nor_regress(
    monkeypatch: pytest.MonkeyPatch, seconds: float, word: str
) -> None:
    """Code that beats itself is noise or a fault of the harness; that it is equal, is believed."""
    monkeypatch.setitem(SECONDS, "B", seconds)
    asked = plan()
    assert conclude(asked, trial(), "no-regression").verdict.outcome == word
    same = msgspec.structs.replace(asked, candidate=asked.baseline)
    conclusion = conclude(same, trial(), "no-regression")
    if word == "no-gain":
        assert (conclusion.verdict.outcome, conclusion.answer) == ("no-gain", "proven")
        return
    assert (conclusion.verdict.outcome, conclusion.answer) == ("inconclusive", "inconclusive")
    assert [each.code for each in conclusion.reasons] == ["same-code-differs"]
    assert "as A and as B" in conclusion.reasons[0].sentence
    made = make_receipt(same, trial(), conclusion, describe_environment())
    assert decode(encode(made)) == made


def test_a_receipt_of_equal_arms_that_says_gain_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever edits the arms to be one and leaves the word gain is found out."""
    monkeypatch.setitem(SECONDS, "B", 0.8)
    data: Any = json.loads(encode(receipt()))
    assert data["predicate"]["conclusion"]["verdict"]["outcome"] == "gain"
    data["predicate"]["arms"]["B"] = data["predicate"]["arms"]["A"]
    with pytest.raises(ReceiptError, match="run as A and as B, differed"):
        decode(json.dumps(data).encode())


@pytest.mark.parametrize("seconds", [0.8, 1.0, 1.25])
def test_a_candidate_that_doubles_memory_fails(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """Private copies of the checkpoint's pages are a failure with a name, and leave no gain."""
    monkeypatch.setitem(SECONDS, "B", seconds)
    seen = trial()
    doubled = msgspec.structs.replace(seen.legs[0].memory, checkpoint_anonymous_bytes=8)
    seen.legs.insert(1, leg("hash", "B", memory=doubled))
    conclusion = conclude(plan(), seen, "no-regression")
    assert (conclusion.answer, conclusion.reasons[0].code) == ("failed", "pages-copied")
    assert (conclusion.verdict.outcome, conclusion.verdict.sound) == ("inconclusive", False)


def test_a_failed_leg_is_inconclusive_and_its_paths_are_cut() -> None:
    """A failure's sentence is in the receipt, without the place of the file."""
    seen = trial()
    sentence = f"OSError: {Path.home()}/some/where/model.safetensors: it broke"
    seen.legs[-1] = leg("time", "A", outcome=Failure("loader-raised", sentence))
    seen.not_run.append(NotRun("the remaining timing legs", "a leg ended without a result"))
    made = receipt(seen)
    assert made.predicate.exit_status == 3
    text = encode(made).decode()
    assert "<...>/model.safetensors: it broke" in text
    assert "some/where" not in text


def test_missing_weights_prove_nothing() -> None:
    """A trial without all its hash legs is not proven, however good its times."""
    seen = trial()
    seen.weights.pop()
    seen.legs.pop(3)
    made = receipt(seen)
    assert made.predicate.conclusion.weights == "unknown"
    assert made.predicate.exit_status == 3


def test_coverage_below_the_threshold_forbids_a_verdict() -> None:
    """A change to a route that no byte took cannot be judged by time; one that all took can."""
    for route, expected in (("direct", "inconclusive"), ("buffered", "proven")):
        found = conclude(plan(), trial(), "no-regression", [route])
        assert found.answer == expected
    silent = trial()
    for number in range(len(silent.legs)):
        _with(silent, number, report=None)
    found = conclude(plan(), silent, "no-regression", ["buffered"])
    assert "coverage-unknown" in {reason.code for reason in found.reasons}


def test_no_place_is_in_a_receipt() -> None:
    """Neither the user's home nor the host's name is in any value of it."""
    text = encode(receipt()).decode()
    assert str(Path.home() / "model") not in text
    assert first_private_text(json.loads(text)) is None
    assert not re.search(rf'"[^"]*\b{re.escape(socket.gethostname())}\b[^"]*"[,\n]', text)


def change(path: str, value: object) -> bytes:
    """Return a receipt's text with one value changed, or removed when it is ``...``."""
    data: Any = json.loads(encode(receipt()))
    *parents, last = path.split("/")
    inner = data
    for part in parents:
        inner = inner[int(part) if isinstance(inner, list) else part]
    if value is ...:
        del inner[last]
    else:
        inner[int(last) if isinstance(inner, list) else last] = value
    return json.dumps(data).encode()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("surprise", 1),
        ("predicate/surprise", 1),
        ("predicate/conclusion/verdict/surprise", 1),
        ("predicate/legs/0/outcome/surprise", 1),
        ("predicate/seed", ...),
        ("predicate/blocks", 10**9),
        ("predicate/blocks", -1),
        ("predicate/controls", ...),
        ("predicate/conclusion/weights", ...),
        ("predicate/exit_status", 1),
        ("predicate/conclusion/answer", "refuted"),
        ("predicate/conclusion/answer", "fine"),
        ("predicate/policy/margin_log_ratio", 0.2),
        ("predicate/policy_digest", "sha256:" + "0" * 64),
        ("predicate/device_class", "gb10"),
        ("predicate/integrity", "signed"),
        ("predicateType", "urn:loadproof:receipt:v0"),
        ("_type", "https://in-toto.io/Statement/v0.1"),
        ("subject/0/digest/sha256", "xyz"),
        ("predicate/conclusion/reasons/0/sentence", "see /home/somebody/model for more"),
    ],
)
def test_a_receipt_that_was_tampered_with_is_refused(path: str, value: object) -> None:
    """Extra, missing, contradicting and private fields are refused in one sentence."""
    with pytest.raises(ReceiptError, match="not a valid receipt") as caught:
        decode(change(path, value))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff", b"null", b"[" * 200_000])
def test_what_is_not_a_receipt_is_refused(text: bytes) -> None:
    """Arbitrary bytes are one sentence, bare or where an envelope is looked for."""
    for read in (decode, open_receipt):
        with pytest.raises(ReceiptError, match="not a valid receipt"):
            read(text)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "rehearsal"),
        ({"fake": False}, "cuda:NVIDIA H200"),
        ({"fake": False, "name": "NVIDIA GB10"}, "cuda:NVIDIA GB10"),
        ({"fake": False, "capability": (12, 1), "integrated": True}, "cuda:NVIDIA H200"),
        (
            {
                "fake": False,
                "capability": (12, 1),
                "integrated": True,
                "host_page_tables": True,
            },
            "gb10",
        ),
        ({"capability": (12, 1), "integrated": True, "host_page_tables": True}, "rehearsal"),
    ],
)
def test_a_gb10_is_one_by_its_attributes(change: dict[str, Any], expected: str) -> None:
    """The name decides nothing, each attribute is needed, and a fake is never one."""
    assert device_class(msgspec.structs.replace(FAKE, **change)) == expected


# What somebody may call a folder: anything but a slash, in odd and ordinary letters.
ODD = st.text(st.sampled_from(" '\",:;()[]{}<>=@~.%&#!\\|`*-_éß漢🙂a0"), max_size=8)
FOLDERS = st.lists(ODD.map(lambda odd: f"Secret{odd}qZ"), min_size=1, max_size=3)
SENTENCES: dict[str, Callable[[str], str]] = {
    "bare": lambda path: f"{path}: it broke",
    "more slashes": lambda path: f"3/4 of {path} (model.bin) and/or model.bin",
    "an OSError": lambda path: str(FileNotFoundError(2, "No such file or directory", path)),
    "two names": lambda path: str(OSError(18, "Invalid link", path, None, path)),
    "quoted": lambda path: f'cannot open "{path}" (is it there?)',
    "bytes": lambda path: f"{path.encode()!r}",
    "JSON": lambda path: json.dumps({"path": path}),
    "URL": lambda path: f"at file://{urllib.parse.quote(path)}, see https://example.org/a/b",
    "local URL": lambda path: f"<sqlite:///{path}>",
    "list": lambda path: f"PATH={path}:{path}",
    "call": lambda path: f"load(checkpoint={path})",
    "home": lambda path: f"~somebody{path} and ~{path}",
    "colon": lambda path: f"it was:{path}",
}


@given(FOLDERS, st.sampled_from(sorted(SENTENCES)))
def test_no_folder_of_an_unknown_path_is_left(folders: list[str], how: str) -> None:
    """Whatever its folders are called and however it is quoted, only its last part is left."""
    cut = without_paths(SENTENCES[how]("/" + "/".join([*folders, "deep", "model.bin"])))
    assert "Secret" not in cut
    assert "deep" not in cut
    assert "model.bin" in cut


@given(FOLDERS, st.sampled_from(sorted(SENTENCES)), st.sampled_from(["", "/model.bin"]))
@example(["Secret"], "bytes", "")
def test_no_known_place_is_left(folders: list[str], how: str, inside: str) -> None:
    """What is known is taken out though it ends the path, holds newlines or follows a letter."""
    place = "/" + "/".join(f"{each}\n \u2028" for each in folders)
    private = private_here(Path(place))
    cut = private.cleared((SENTENCES[how](place + inside), f"x{place}"))
    assert "Secret" not in "".join(cut)


@pytest.mark.parametrize(
    "text",
    [
        r"C:\Users\Secret Name\model.bin",
        r"'D:\\Secret, Inc.\\a (b)\\model.bin'",
        r"\\Secret\share\some where\model.bin",
        "C:/Secret Name/a/model.bin",
        r"C:\Users\Secret",
        "/home/Secret: it broke",
        "/Users/Secret",
        "file:///Secret/",
        "file:/home/Secret/model.bin",
        "git+file:///home/Secret/model.bin",
        "//server/Secret/model.bin",
        "~Secret/model.bin",
    ],
)
def test_other_spellings_of_places_are_cut_too(text: str) -> None:
    """Those of another system, of a network, of a URL, and somebody's home itself."""
    assert "Secret" not in without_paths(text)


def test_the_user_and_the_host_are_taken_out_of_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sentences, and of what loaders report; a word of ours stays, though a user has it."""
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu17.example.org")
    monkeypatch.setattr(getpass, "getuser", lambda: "warm")
    private = private_here(kept=["warm up"])
    said = {
        "sentence": "warm@gpu17 (gpu17.example.org) is no warmer than gpu170",
        "state": "warm",
        "tensor": "warm up",
        "report": {"host": "gpu17", "warm": 1, "of /a/b/c": 2, "of /d/c": 3},
    }
    assert private.cleared_json(said) == {
        "sentence": "<...>@<...> (<...>) is no warmer than gpu170",
        "state": "warm",
        "tensor": "warm up",
        "report": {"host": "<...>", "<...>": 1, "of <...>/c": 2, "of <...>/c again": 3},
    }


@given(st.text(max_size=60) | st.text("/ab .:~\\'\"<>(,){}\n", max_size=30))
def test_paths_are_cut_to_their_last_part(text: str) -> None:
    """Whatever the text, what is left names no place, and cutting twice changes nothing."""
    cut = without_paths(text)
    assert first_private_text(cut) is None
    assert without_paths(cut) == cut


def test_words_with_slashes_are_no_paths() -> None:
    """Units, fractions, addresses of the web and relative names stay."""
    for text in ("GB/s", "1/2", "and/or", "https://in-toto.io/Statement/v1", "a/b/c.py", "/"):
        assert without_paths(text) == text


def not_run(seen: Trial, what: str) -> list[str]:
    """Why a trial's receipt says that something was not run."""
    return [each.why for each in receipt(seen).predicate.not_run if each.what == what]


def test_a_ring_that_was_never_full_is_not_said_to_settle() -> None:
    """With a slot for every read the bytes say nothing about a slot that is used again."""
    settled = "a slot that is settled and used again"
    for reads, said in ((3, True), (4, True), (5, False), ("4", False)):
        seen = trial()
        _with(seen, 0, report={"reads": reads, "slot_count": 4})
        assert bool(not_run(seen, settled)) == said
    assert not_run(trial(), settled) == []


def test_an_audit_says_how_much_it_read() -> None:
    """The least that a timing leg read back, of how much; nothing is said when it was all."""
    missing = "the bytes of every tensor after every timing leg"
    assert not_run(trial(), missing) == []
    seen = trial()
    _with(seen, 5, audited_bytes=3)
    (why,) = not_run(seen, missing)
    assert "at least 3 of 8 bytes" in why
    assert "48 timing legs were read back" in render(receipt(seen))
    assert "at least 3 of 8 bytes" in render(receipt(seen))


def serve_leg(arm: str, **changes: Any) -> Leg:
    """A serve leg that served the same two tokens as every other one."""
    answer = Answer(asked_tokens=24, prompt_tokens=24, first_s=0.1, seconds=0.2, tokens=(4, 5))
    served = Served(model="M", dtype="float32", place="cpu", answers=(answer,))
    like = leg("time", "A").outcome
    return leg("serve", arm, outcome=msgspec.structs.replace(like, served=served), **changes)


def served_trial() -> Trial:
    """A whole trial that also served."""
    seen = trial()
    seen.legs[1:1] = [serve_leg(arm) for arm in ("reference", "A", "B")]
    return seen


def test_served_output_is_in_the_receipt_and_the_pages() -> None:
    """Equal output is said so, with its tokens, in the headline, the text and the page."""
    made = receipt(served_trial())
    assert (made.predicate.conclusion.served, made.predicate.exit_status) == ("equal", 0)
    assert "served output equal" in render(made).splitlines()[0]
    assert "| reference | 24 | warm | 1.00 s | 0.100 s | 0.200 s | 4 5 |" in render(made)
    assert "<td>4 5</td>" in render_page(made)
    assert decode(encode(made)) == made


def test_other_tokens_outrank_time() -> None:
    """An arm that serves another token fails the trial, named with the token."""
    seen = served_trial()
    other = serve_leg("B")
    assert isinstance(other.outcome, Result)
    assert other.outcome.served is not None
    (answer,) = other.outcome.served.answers
    changed = msgspec.structs.replace(
        other.outcome.served, answers=(msgspec.structs.replace(answer, tokens=(4, 9)),)
    )
    seen.legs[3] = leg(
        "serve", "B", outcome=msgspec.structs.replace(other.outcome, served=changed)
    )
    made = receipt(seen)
    assert (made.predicate.conclusion.served, made.predicate.exit_status) == ("differs", 4)
    assert made.predicate.conclusion.verdict.outcome == "inconclusive"
    assert not made.predicate.conclusion.verdict.sound
    (reason,) = made.predicate.conclusion.reasons
    assert reason.code == "served-differs"
    assert "Arm B" in reason.sentence
    assert "token 2 of 2 after a prompt of 24 tokens was 9, and not 5" in reason.sentence


@pytest.mark.parametrize(
    ("place", "word", "answer"),
    [(1, "not-run", "proven"), (2, "not-run", "proven"), (3, "differs", "failed")],
)
def test_what_cannot_be_served_is_a_failure_only_of_a_candidate_alone(
    place: int, word: str, answer: str
) -> None:
    """The reference or the baseline that cannot be served leaves the other words as they are."""
    seen = served_trial()
    refused = Failure("cannot-serve", "There is no kernel.")
    seen.legs[place] = leg("serve", seen.legs[place].arm, outcome=refused)
    conclusion = receipt(seen).predicate.conclusion
    assert (conclusion.served, conclusion.answer) == (word, answer)
    assert ("There is no kernel." in conclusion.reasons[0].sentence) == (answer == "failed")


def test_another_failure_of_a_serve_leg_is_inconclusive() -> None:
    """A leg that was killed proves nothing."""
    seen = served_trial()
    seen.legs[1] = leg("serve", "reference", outcome=Failure("leg-killed", "It was killed."))
    assert receipt(seen).predicate.exit_status == 3


def test_a_race_in_a_serve_leg_forbids_a_verdict() -> None:
    """What raced there may race anywhere."""
    seen = served_trial()
    _with(seen, 2, hazards=("PIN-REUSE-BEFORE-COPY: x",))
    conclusion = receipt(seen).predicate.conclusion
    assert [each.code for each in conclusion.reasons] == ["hazard"]
    assert "serve leg of A" in conclusion.reasons[0].sentence


# Names that would be marks of a page, or speak to a terminal.
SPEAKING = [
    "a\n| b | c |\n# d",
    "a|b",
    "`a` ``b``",
    "`",
    "",
    " ",
    "<img src=x onerror=alert(1)>",
    "</code><script>",
    "[a](javascript:b)",
    "**a** __b__ &lt; a\\",
    "\x1b[31ma\u2028\u202eb",
]


@pytest.mark.parametrize("name", SPEAKING)
def test_a_name_is_no_mark_of_a_page(name: str) -> None:
    """Whatever a tensor or a leg's failure is called, pages have the lines and tags they had."""

    def pages(called: str) -> tuple[str, str]:
        named = TensorDigest(
            name=called, dtype="F32", shape=(2,), nbytes=8, sha256="b" * 64, crc32=1
        )
        asked = msgspec.structs.replace(plan(), truth=Manifest((named,)))
        seen = _of(asked.truth)
        seen.controls = [
            msgspec.structs.replace(each, tensor=called, blamed=(called,), seen=(called,))
            for each in seen.controls
        ]
        wrong = (Difference(called, "bytes"),)
        seen.weights[-1] = msgspec.structs.replace(
            seen.weights[-1], differences=wrong, manifest="f" * 64
        )
        seen.legs[-1] = leg("time", "A", outcome=Failure(called, f"It is called {called}."))
        seen.not_run.append(NotRun(called, called))
        concluded = conclude(asked, seen, "no-regression")
        made = make_receipt(asked, seen, concluded, describe_environment())
        assert decode(encode(made)) == made
        return render(made), render_page(made)

    (text, page), (odd_text, odd_page) = pages("plain"), pages(name)
    assert _marks(odd_text) == _marks(text)
    assert _tags(odd_page) == _tags(page)
    assert all(each.isprintable() for each in (odd_text + odd_page).replace("\n", ""))


def _marks(text: str) -> list[str]:
    """What CommonMark and tables make of a text, but for the words."""
    found = []
    for token in MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text):
        inline = [each.type for each in token.children or () if not each.type.startswith("text")]
        found += [token.type, *inline]
    return found


def _tags(page: str) -> list[str]:
    return re.findall("<[a-z/!][^>]*>", page)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("conclusion/served", "differs", "served output"),
        ("conclusion/served", "not-run", "served output"),
        ("legs/3/outcome/served/answers/0/tokens/1", 9, "served output"),
        ("tensor_lines/0/4", "0" * 64, "tensors that are listed"),
        ("tensor_lines/0/3", 9, "tensors that are listed"),
    ],
)
def test_served_output_and_tensors_that_were_tampered_with_are_refused(
    path: str, value: object, said: str
) -> None:
    """The word follows from the legs, and the digest of all weights from the list."""
    data: Any = json.loads(encode(receipt(served_trial())))["predicate"]
    *parents, last = path.split("/")
    inner = data
    for part in parents:
        inner = inner[int(part) if isinstance(inner, list) else part]
    inner[int(last) if isinstance(inner, list) else last] = value
    whole = json.loads(encode(receipt(served_trial()))) | {"predicate": data}
    with pytest.raises(ReceiptError, match=said):
        decode(json.dumps(whole).encode())


def _of(truth: Manifest) -> Trial:
    """A trial whose hash legs found these tensors on the device."""
    seen = trial()
    seen.weights = [
        msgspec.structs.replace(each, manifest=truth.digest()) for each in seen.weights
    ]
    return seen


def test_tensors_are_listed_in_part_where_there_are_very_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first by name and those that differ are listed; the page says how many it leaves out."""
    monkeypatch.setattr("loadproof.report.receipt.TENSORS_LISTED_MAX", 300)
    tensors = tuple(
        TensorDigest(name=f"t{n:04}", dtype="F32", shape=(2,), nbytes=8, sha256="b" * 64, crc32=n)
        for n in range(1000)
    )
    many = msgspec.structs.replace(plan(), truth=Manifest(tensors))
    seen = _of(many.truth)
    wrong = (Difference("t0250", "bytes"), Difference("t0900", "bytes"))
    seen.weights[-1] = msgspec.structs.replace(
        seen.weights[-1], differences=wrong, manifest="f" * 64
    )
    made = make_receipt(many, seen, conclude(many, seen, "no-regression"), describe_environment())
    names = [line.name for line in made.predicate.tensor_lines]
    assert names == [*(f"t{n:04}" for n in range(300)), "t0900"]
    page = render_page(made)
    rows = re.findall(r"<td>(t0\d{3})</td><td>(\w+)</td><td>(\w+)</td>", page)
    assert rows[:2] == [("t0250", "equal", "bytes"), ("t0900", "equal", "bytes")]
    assert rows[2:] == [(f"t{n:04}", "equal", "equal") for n in range(198)]
    assert "800 more tensors are not shown here; none of them differs." in page
