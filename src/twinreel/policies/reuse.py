"""Reuse: steps of a fixed window move by the last computed velocities (`policy_options.Reuse`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..limits import counted
from ..noise import Rows
from ..policy import Update
from ..policy_options import Reuse, format_policy
from ..policy_windows import is_refreshed, meaningless, reuse_window
from .motion import Setting


class Reusing:
    """State of one request: the last computed velocities, and with a threshold the rows they were computed from."""

    name = "reuse"

    def __init__(self, options: Reuse, setting: Setting) -> None:
        self.options, self.setting = options, setting
        self.window = reuse_window(setting.calls, options)
        self.computed: list[int] = []
        self.reused: list[int] = []
        self.changes: dict[int, tuple[float, float]] = {}
        self._velocity: Rows | None = None
        self._rows: Rows | None = None
        self._run = 0

    def update(self, step: int, rows: Rows, call: Callable[[], Rows]) -> Update:
        """The last velocities where the schedule (and the threshold) allows, otherwise the model's."""
        reuse = self._reuses(step, rows)
        self._run = self._run + 1 if reuse else 0
        if reuse:
            self.reused.append(step)
            if self.options.mode == "reuse":
                assert self._velocity is not None
                return Update(self._velocity)
        self.computed.append(step)
        velocity = call()
        if not reuse:  # a probe goes on as the run it stands for would
            self._velocity = Rows(velocity.video.clone(), velocity.audio.clone())
            self._rows = Rows(rows.video.clone(), rows.audio.clone())  # the loop writes over its rows
        return Update(velocity)

    def _reuses(self, step: int, rows: Rows) -> bool:
        options = self.options
        if options.mode == "off" or step not in self.window or is_refreshed(step, self.window, options):
            return False
        if self._run >= options.max_consecutive_reuse:
            return False
        if options.threshold is None:
            return True
        assert self._rows is not None
        self.changes[step] = self.setting.change(self._rows, rows)
        return max(self.changes[step]) < options.threshold

    def report(self) -> dict[str, Any]:
        """Computed and reused steps (`would_reuse` of a probe) and the measured changes of the rows."""
        probe = self.options.mode == "probe"
        facts: dict[str, Any] = {
            "name": self.name,
            "options": format_policy(self.options),
            "calls": len(self.computed),
            "computed": self.computed,
            "would_reuse" if probe else "reused": self.reused,
        }
        if self.changes:
            facts["change"] = {
                "steps": list(self.changes),
                "video": [video for video, _ in self.changes.values()],
                "audio": [audio for _, audio in self.changes.values()],
            }
        if not self.reused and self.options.mode != "off":
            calls, steps = counted(self.setting.calls, "call"), f"{self.window.start} to {self.window.stop - 1}"
            never = f"reuse never engaged: every one of {calls} was computed; its window is steps {steps}"
            facts["warning"] = meaningless(self.setting.calls, self.options) or never
        return facts
