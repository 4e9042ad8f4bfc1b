"""The loop: what it moves, what it leaves alone, and where it stops."""

from __future__ import annotations

import pytest
import torch

from op_cases import euler
from twinreel.denoise import advance, denoise
from twinreel.errors import Cancelled
from twinreel.layout import PackedLayout, build_layout
from twinreel.noise import Rows
from twinreel.ops import select
from twinreel.plan import Condition, Plan
from twinreel.policy import EveryStep, Update
from twinreel.schedule import factors, make_sigmas
from twinreel.spec import Spec

CONDITIONS = (
    Condition("audio", "reference", 0, audio_latents=5),
    Condition("image", "reference", 1, None, 64, 64, 1, 1, 1),
)
PLAN = Plan("ref2va", "ref2va", "a", 64, 96, 22, 7, 37, 6, 0, "official", (12.0, 3.0), CONDITIONS)
SIGMAS = make_sigmas(6, (12.0, 3.0))
MOVE = select().euler


def start() -> tuple[Rows, PackedLayout]:
    layout = build_layout(PLAN, torch.ones(4, dtype=torch.int64), Spec())
    return Rows(torch.randn(len(layout.video_indices), 96), torch.randn(len(layout.audio_indices), 32)), layout


def model(step: int, rows: Rows) -> Rows:
    return Rows(torch.sin(rows.video + step), torch.cos(rows.audio * 2 + step))


def test_target_rows_move_and_condition_rows_do_not() -> None:
    rows, layout = start()
    policy = EveryStep()
    end = denoise(rows, layout, SIGMAS, model, policy, lambda step, velocity: None, move=MOVE)
    assert policy.computed == [0, 1, 2, 3, 4]
    v, a = layout.condition_video, layout.condition_audio
    assert (v, a) == (4, 10)
    assert torch.equal(end.video[:v], rows.video[:v]) and torch.equal(end.audio[:a], rows.audio[:a])
    expected_video, expected_audio = rows.video[v:], rows.audio[a:]
    for step in range(5):
        velocity = model(step, Rows(expected_video, expected_audio))
        expected_video = euler(expected_video, velocity.video, SIGMAS.video, step)
        expected_audio = euler(expected_audio, velocity.audio, SIGMAS.audio, step)
    assert torch.equal(end.video[v:], expected_video) and torch.equal(end.audio[a:], expected_audio)


def test_the_rows_given_are_not_written_to() -> None:
    rows, layout = start()
    before = Rows(rows.video.clone(), rows.audio.clone())
    out = Rows(rows.video.clone(), rows.audio.clone())
    steps = factors(SIGMAS.video, 0), factors(SIGMAS.audio, 0)
    advance(rows, model(0, rows), out, steps, layout, MOVE)
    assert not torch.equal(out.video, before.video) and not torch.equal(out.audio, before.audio)
    denoise(rows, layout, SIGMAS, model, EveryStep(), lambda step, velocity: None, move=MOVE)
    assert torch.equal(rows.video, before.video) and torch.equal(rows.audio, before.audio)


def test_the_loop_writes_to_the_same_rows_in_every_step() -> None:
    rows, layout = start()
    places = set[tuple[int, int]]()

    def watching(step: int, at: Rows) -> Rows:
        places.add((at.video.data_ptr(), at.audio.data_ptr()))
        return model(step, at)

    denoise(rows, layout, SIGMAS, watching, EveryStep(), lambda step, velocity: None, move=MOVE)
    assert len(places) == 1


def test_the_vote_sees_every_step_and_can_stop() -> None:
    rows, layout = start()
    seen: list[int] = []

    def vote(step: int, velocity: Rows) -> None:
        seen.append(step)
        assert velocity.video.shape == rows.video.shape
        if step == 2:
            raise Cancelled("enough")

    with pytest.raises(Cancelled):
        denoise(rows, layout, SIGMAS, model, EveryStep(), vote, move=MOVE)
    assert seen == [0, 1, 2]


def test_a_policy_may_skip_calls_and_correct_rows() -> None:
    rows, layout = start()
    calls: list[int] = []

    class Reuse:
        name = "reuse"
        last: Rows

        def update(self, step, rows, call):  # noqa: ANN001, ANN202
            if step % 2 == 0:
                self.last = call()
            return Update(self.last, Rows(rows.video * 0.5, rows.audio * 0.5))

        def report(self):  # noqa: ANN202
            return {}

    end = denoise(
        rows, layout, SIGMAS, lambda s, r: calls.append(s) or model(s, r), Reuse(), lambda s, v: None, move=MOVE
    )
    assert calls == [0, 2, 4]
    assert not torch.equal(
        end.video, denoise(rows, layout, SIGMAS, model, EveryStep(), lambda s, v: None, move=MOVE).video
    )
