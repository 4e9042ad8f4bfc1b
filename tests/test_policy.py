"""Step policies on analytic velocity fields: schedules, exactness, corrections, decisions, reports."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mixture import decibels, make
from mixture import run as sample
from op_cases import euler
from tiny import tiny_spec
from twinreel.calibration import PROFILE_SCHEMA
from twinreel.errors import RequestError
from twinreel.noise import Rows
from twinreel.policies import Setting, make_policy
from twinreel.policy import EveryStep, Update
from twinreel.policy_options import PRESETS, Adaptive, Calibrate, Forecast, Plain, Reuse, format_policy, parse_policy
from twinreel.request import Request, check_request
from twinreel.request_json import request_from_json, request_to_json
from twinreel.schedule import make_sigmas

ROWS = Rows(torch.ones(2, 3), torch.zeros(1, 2))
OTHER = Rows(torch.zeros(2, 3), torch.ones(1, 2))
SHAPES = (12, 96), (6, 32)
Field = Callable[[float, Rows, int], torch.Tensor]


def setting(steps: int = 50, **values: object) -> Setting:
    sigmas = make_sigmas(steps, (12.0, 3.0))
    return Setting(sigmas.video.sigmas.tolist(), sigmas.audio.sigmas.tolist(), **values)  # type: ignore[arg-type]


def noise(seed: int) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    return Rows(*(torch.randn(shape, generator=generator) for shape in SHAPES))


A, B, C = noise(1), noise(2), noise(3)


def constant(sigma: float, rows: Rows, modality: int) -> torch.Tensor:
    return (A.video, A.audio)[modality]


def linear(sigma: float, rows: Rows, modality: int) -> torch.Tensor:
    return (A.video, A.audio)[modality] + sigma * (B.video, B.audio)[modality]


def quadratic(sigma: float, rows: Rows, modality: int) -> torch.Tensor:
    return linear(sigma, rows, modality) + sigma * sigma * (C.video, C.audio)[modality]


def curved(sigma: float, rows: Rows, modality: int) -> torch.Tensor:
    """A smooth flow that depends on the state: towards a point that turns with sigma."""
    target = torch.sin(3 * sigma * (A.video, A.audio)[modality])
    return (target - (rows.video, rows.audio)[modality]) * 0.7


def run(policy_text: object, field: Field, steps: int = 50, **values: object) -> tuple[Rows, dict, list[int]]:
    """Final rows, report, and the steps at which the model was called."""
    sigmas, called = make_sigmas(steps, (12.0, 3.0)), list[int]()
    policy = make_policy(parse_policy(policy_text), setting(steps, **values))  # type: ignore[arg-type]
    rows = noise(0)
    for step in range(sigmas.calls):

        def call(step: int = step, rows: Rows = rows) -> Rows:
            called.append(step)
            grids = sigmas.video, sigmas.audio
            return Rows(*(field(float(grid.sigmas[step]), rows, i) for i, grid in enumerate(grids)))

        update = policy.update(step, rows, call)
        moved = update.corrected(rows)
        rows = Rows(
            euler(moved.video, update.velocity.video, sigmas.video, step),
            euler(moved.audio, update.velocity.audio, sigmas.audio, step),
        )
    report = json.loads(json.dumps(policy.report(), allow_nan=False))
    assert report["computed"] == called and report["calls"] == len(called)
    return rows, report, called


def error(a: Rows, b: Rows) -> tuple[float, float]:
    return (a.video - b.video).abs().max().item(), (a.audio - b.audio).abs().max().item()


def test_every_step_calls_and_counts() -> None:
    policy = EveryStep()
    update = policy.update(3, ROWS, lambda: OTHER)
    assert update.velocity is OTHER and update.corrected(ROWS) is ROWS
    assert policy.report() == {"name": "every-step", "calls": 1, "computed": [3]}
    assert EveryStep().computed == []


def test_a_correction_replaces_the_rows() -> None:
    assert Update(OTHER, correction=OTHER).corrected(ROWS) is OTHER


def test_reuse_is_the_published_schedule() -> None:
    _, report, called = run("reuse", curved)
    assert len(called) == 34 and report["reused"] == list(range(10, 39, 2))
    assert parse_policy("reuse") == parse_policy("velocity") == parse_policy("conservative") == Reuse()
    assert vars(Reuse(mode="off")) == {
        "mode": "off", "start_ratio": 0.2, "end_ratio": 0.8, "refresh_interval": 2, "max_consecutive_reuse": 1,
        "threshold": None,
    }  # fmt: skip


def test_reuse_moves_by_both_last_velocities_with_the_current_sigmas() -> None:
    seen: dict[int, Update] = {}
    policy = make_policy(Reuse(), setting())
    for step in range(49):
        values = Rows(torch.full((2, 3), float(step)), torch.full((1, 2), -float(step)))
        seen[step] = policy.update(step, ROWS, lambda values=values: values)
        values.video.fill_(1e9)  # the model's memory is its own: what is reused must be a copy
    assert all(torch.equal(seen[step].velocity.video, torch.full((2, 3), step - 1.0)) for step in range(10, 39, 2))
    assert all(torch.equal(seen[step].velocity.audio, torch.full((1, 2), 1.0 - step)) for step in range(10, 39, 2))
    assert all(update.correction is None for update in seen.values())


def test_reuse_off_is_every_step_bit_for_bit() -> None:
    assert error(run("reuse:mode=off", curved)[0], run("every-step", curved)[0]) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("text", "reused"),
    [
        ("reuse:refresh_interval=3", [s for s in range(9, 40) if (s - 9) % 3 == 1]),  # two in a row are not allowed
        ("reuse:refresh_interval=3,max_consecutive_reuse=2", [s for s in range(9, 40) if (s - 9) % 3]),
        ("reuse:start_ratio=0,end_ratio=1", list(range(2, 48, 2))),
        ("reuse:refresh_interval=1", []),
        ("reuse:max_consecutive_reuse=0", []),
    ],
)
def test_reuse_fields(text: str, reused: list[int]) -> None:
    assert run(text, curved)[1]["reused"] == reused


def test_threshold_looks_at_both_modalities_and_at_the_agreed_value() -> None:
    assert run("reuse:threshold=1e9", curved)[1]["reused"] == list(range(10, 39, 2))
    _, report, called = run("reuse:threshold=1e-9", curved)
    assert len(called) == 49 and "never engaged" in report["warning"]
    assert report["change"]["steps"] == list(range(10, 39, 2)) and min(report["change"]["audio"]) > 0
    # another rank saw a large change of the sound alone
    _, report, called = run(
        "reuse:threshold=0.5", constant, agree=lambda ballot: torch.maximum(ballot, torch.tensor([0.0, 0.6]))
    )
    assert len(called) == 49


def test_probe_computes_everything_and_tells() -> None:
    rows, report, called = run("reuse:mode=probe", curved)
    assert called == list(range(49)) and report["would_reuse"] == list(range(10, 39, 2))
    assert error(rows, run("every-step", curved)[0]) == (0.0, 0.0)


def test_forecast_presets_at_50_steps() -> None:
    calls = {name: len(run(f"forecast:{name}", curved)[2]) for name in PRESETS}
    assert calls == {"gentle": 28, "balanced": 24, "fast": 21}
    _, report, _ = run("forecast:fast", curved)
    assert report["computed"][:6] == [0, 1, 2, 3, 4, 7] and report["computed"][-3:] == [46, 47, 48]
    assert report["corrected"] == report["forecast"]
    assert report["error"]["steps"] == [step for step in report["computed"] if step >= 2]


@given(steps=st.integers(2, 120), name=st.sampled_from(sorted(PRESETS)))
def test_forecast_schedules_of_any_length(steps: int, name: str) -> None:
    policy = make_policy(PRESETS[name], setting(steps))
    run_length, last = 0, steps - 2
    for step in range(steps - 1):
        policy.update(step, ROWS, lambda: OTHER)
        skipped = step in policy.report()["forecast"]
        assert not skipped or 2 <= step <= last - 3 and step >= 0.1 * (steps - 1)
        run_length = run_length + 1 if skipped else 0
        assert run_length <= max(PRESETS[name].pattern)
    report = policy.report()
    assert len(report["computed"]) + len(report["forecast"]) == steps - 1
    assert bool(report["forecast"]) != ("warning" in report) and report["corrected"] == report["forecast"]


@pytest.mark.parametrize("policy", ["reuse", "forecast"])
def test_a_single_call_is_told_as_one(policy: str) -> None:
    warning = run(policy, curved, steps=2)[1]["warning"]
    assert "no meaning for 1 call" in warning and "1 calls" not in warning


@pytest.mark.parametrize("name", PRESETS)
def test_few_calls_run_every_step_and_say_so(name: str) -> None:
    rows, report, called = run(f"forecast:{name}", curved, steps=6)
    assert called == list(range(5)) and "no meaning for 5 calls" in report["warning"]
    assert error(rows, run("every-step", curved, steps=6)[0]) == (0.0, 0.0)


@pytest.mark.parametrize("name", PRESETS)
def test_a_velocity_linear_in_sigma_is_forecast_exactly(name: str) -> None:
    rows, report, _ = run(f"forecast:{name}", linear)
    assert max(error(rows, run("every-step", linear)[0])) < 2e-5
    assert max(report["error"]["video"] + report["error"]["audio"]) < 1e-4


def test_constant_velocities_are_forecast_bit_for_bit() -> None:
    # the fit is the newest velocity plus weighted differences, and they vanish
    assert error(run("forecast:fast", constant)[0], run("every-step", constant)[0]) == (0.0, 0.0)


def test_a_parabola_needs_order_two() -> None:
    base = run("every-step", quadratic)[0]
    assert max(error(run("forecast:fast,order=2,correct=2", quadratic)[0], base)) < 1e-4
    assert max(error(run("forecast:fast", quadratic)[0], base)) > 1e-3
    assert max(error(run("forecast:fast,order=0,correct=0", quadratic)[0], base)) > 1e-2


def test_the_correction_is_worth_it_and_forecast_beats_reuse() -> None:
    base = run("every-step", curved)[0]

    def mean(text: str) -> tuple[float, float]:
        rows = run(text, curved)[0]
        return (rows.video - base.video).pow(2).mean().item(), (rows.audio - base.audio).pow(2).mean().item()

    corrected, plain, reuse = (mean(f"{text}") for text in ("forecast", "forecast:correct=0", "reuse"))
    assert corrected[0] < plain[0] / 2 and corrected[1] < plain[1] / 2
    assert corrected[1] < reuse[1] / 2 and plain[1] < reuse[1]


def test_a_parabola_corrects_what_a_line_has_forecast() -> None:
    base = run("every-step", quadratic)[0]
    assert max(error(run("forecast:fast,correct=2", quadratic)[0], base)) < 1e-4


def test_forecasts_beat_reuse_on_a_mixture() -> None:
    mixture = make(0, 0.3, modes=60)
    base = sample("every-step", mixture, 16)[0]

    def worst(policy: str) -> tuple[float, float]:
        video, audio = decibels(base, sample(policy, mixture, 16)[0])
        return video.min().item(), audio.min().item()

    reuse, line, parabola = worst("reuse"), worst("forecast:balanced"), worst("forecast:balanced,order=2,correct=2")
    assert reuse[0] < line[0] < parabola[0] and reuse[1] < line[1] < parabola[1]


def test_the_arithmetic_of_one_skip_spelled_out() -> None:
    """Extrapolate, compute, interpolate, correct: float32 products and sums, in this order."""
    options = Forecast(pattern=(1,), head=0.0)
    s = setting(8)
    policy = make_policy(options, s)
    velocities = [noise(step) for step in range(4)]
    rows = noise(9)
    for step in (0, 1):
        policy.update(step, rows, lambda step=step: velocities[step])
    v0, v1, v3 = (velocities[i].video for i in (0, 1, 3))
    x = list(s.video)
    used = v1 + (x[2] - x[1]) / (x[0] - x[1]) * (v0 - v1)
    assert torch.equal(policy.update(2, rows, lambda: pytest.fail("called")).velocity.video, used)
    update = policy.update(3, rows, lambda: velocities[3])
    better = v3 + (x[2] - x[3]) / (x[1] - x[3]) * (v1 - v3)
    assert torch.equal(update.corrected(rows).video, rows.video + (x[2] - x[3]) * (better - used))
    assert update.velocity is velocities[3]


def test_condition_rows_are_neither_moved_nor_measured() -> None:
    policy = make_policy(Forecast(pattern=(1,), head=0.0), setting(8, condition_video=5, condition_audio=2))
    rows = noise(9)
    for step in range(4):
        values = noise(step)
        values.video[:5], values.audio[:2] = float("nan"), float("nan")
        update = policy.update(step, rows, lambda values=values: values)
    moved = update.corrected(rows)
    assert torch.equal(moved.video[:5], rows.video[:5]) and torch.equal(moved.audio[:2], rows.audio[:2])
    assert not torch.equal(moved.video[5:], rows.video[5:])
    assert min(policy.report()["error"]["video"]) > 0


def test_adaptive_spends_calls_where_the_velocity_bends() -> None:
    loose, tight = (run(f"adaptive:video={t},audio={t}", curved) for t in (0.2, 0.002))
    assert len(loose[2]) < len(tight[2]) <= 49
    base = run("every-step", curved)[0]
    assert max(error(tight[0], base)) < max(error(loose[0], base))
    # a straight flow needs almost none
    calls = run("adaptive:most=3", linear)[2]
    assert len(calls) < 22
    never = run("adaptive:video=1e-9,audio=1e-9", curved)
    assert len(never[2]) == 49 and "never engaged" in never[1]["warning"]


def test_adaptive_follows_the_agreed_error_of_all_ranks() -> None:
    bad = run("adaptive", linear, agree=lambda ballot: torch.full_like(ballot, 9.0))
    assert len(bad[2]) == 49


IDENTITY = {"steps": 50, "shifts": [12.0, 3.0], "task": "t2va", "size": [64, 96, 22], "weights": "abc"}


def calibrated(path: Path) -> Path:
    rows, report, called = run(Calibrate(), curved, identity=lambda: IDENTITY)
    assert called == list(range(49)) and report["profile"]["schema"] == PROFILE_SCHEMA
    assert error(rows, run("every-step", curved)[0]) == (0.0, 0.0)
    path.write_text(json.dumps({"policy": report}))
    return path


def test_a_profile_plans_the_skips(tmp_path: Path) -> None:
    path = calibrated(tmp_path / "out.json")
    rows, report, called = run(f"adaptive:profile={path},video=0.05,audio=0.05", curved, identity=lambda: IDENTITY)
    assert 0 < len(report["planned"]) == 49 - len(called) and report["forecast"] == report["planned"]
    assert max(b - a for a, b in zip(called, called[1:], strict=False)) <= 4
    tight = run(f"adaptive:profile={path},video=0.001,audio=0.001", curved, identity=lambda: IDENTITY)
    assert len(tight[2]) > len(called)
    assert max(error(tight[0], run("every-step", curved)[0])) < max(error(rows, run("every-step", curved)[0]))


@pytest.mark.parametrize("name", IDENTITY)
def test_a_profile_of_another_request_is_refused(tmp_path: Path, name: str) -> None:
    path = calibrated(tmp_path / "out.json")
    other = IDENTITY | {name: "another"}
    with pytest.raises(RequestError, match=rf"policy: .* made for {name} .*calibrate anew"):
        run(f"adaptive:profile={path}", curved, identity=lambda: other)


def test_a_file_that_is_no_profile_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    for name, reason in (("a.json", "holds no profile"), ("b.json", "cannot be read")):
        with pytest.raises(RequestError, match=reason):
            run(f"adaptive:profile={tmp_path / name}", curved)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("every-step", Plain()),
        ("reuse:threshold=0.1,mode=probe", Reuse(threshold=0.1, mode="probe")),
        ("forecast", PRESETS["balanced"]),
        ("forecast:fast,tail=4", Forecast(pattern=(2,), tail=4)),
        ("forecast:pattern=1+2+3,correct=0", Forecast(pattern=(1, 2, 3), correct=0)),
        ("adaptive:video=0.1,profile=a/b.json", Adaptive(video=0.1, profile="a/b.json")),
        ("calibrate", Calibrate()),
    ],
)
def test_texts_and_options(text: str, options: object) -> None:
    assert parse_policy(text) == options == parse_policy(format_policy(options))  # type: ignore[arg-type]
    assert parse_policy(options) is options  # type: ignore[arg-type]


def test_requests_carry_a_policy_through_json() -> None:
    request = Request("The sea.", policy=Reuse(threshold=0.1))
    body = request_to_json(request)
    assert body["policy"] == "reuse:threshold=0.1" and request_from_json(body).policy == body["policy"]
    assert "policy" not in request_to_json(Request("The sea."))
    with pytest.raises(RequestError, match="policy: got 'none'"):
        check_request(Request("The sea.", policy="none"), tiny_spec())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("none", "use every-step, reuse"),
        ("reuse:interval=2", "its fields are mode"),
        ("forecast:wild", "use gentle, balanced, fast"),
        ("reuse:", "'' is not field=value of reuse"),
        ("reuse:,", "'' is not field=value of reuse"),
        ("reuse:threshold=0.1,", "'' is not field=value of reuse"),
        ("every-step:", "its fields are none"),
        ("forecast:", "no preset ''; use gentle, balanced, fast"),
        ("forecast:fast,,tail=4", "'' is not field=value of forecast"),
        ("reuse:start_ratio=0.9", "after end_ratio"),
        ("reuse:start_ratio=nan", "from 0 to 1"),
        ("reuse:threshold=0.1,threshold=0.2", "threshold was given twice"),
        ("forecast:fast,tail=2,tail=2", "tail was given twice"),
        ("reuse:threshold=0", "positive"),
        ("reuse:refresh_interval=x", "such as 2"),
        ("forecast:tail=0", "from 1 on"),
        ("forecast:order=4", "from 0 to 3"),
        ("forecast:correct=-1", "from 0 on"),
        ("forecast:pattern=0", "from 1 to 8"),
        ("reuse:mode=on", "use off, reuse or probe"),
        (7, "use every-step"),
        ("x" * 10_000, "10002 characters"),
        (f"forecast:{'x' * 10_000}", "10002 characters"),
        (f"reuse:{'x' * 10_000}=1", "10004 characters"),
        (f"reuse:mode={'x' * 10_000}", "10002 characters"),
        (f"reuse:threshold={'x' * 10_000}", "10002 characters"),
        (f"forecast:pattern={'+'.join(['9'] * 1000)}", "from 1 to 8"),
        (Adaptive(profile=3), "profile is 3; the path of a file"),  # type: ignore[arg-type]
        (Adaptive(profile=""), "profile is ''"),
        (Adaptive(video=10**400), "a positive number"),
        (Adaptive(audio=10**5000), "int too long to print; a positive number"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
def test_bad_policies_are_refused_by_name(text: object, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        parse_policy(text)  # type: ignore[arg-type]
    assert caught.value.field == "policy" and len(str(caught.value)) < 300
