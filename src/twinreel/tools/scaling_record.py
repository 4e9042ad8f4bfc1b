"""The files of `bench scaling`: its figures, and one rank's velocities beside them, both with the settings they are of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..output.placing import replacing
from ..small_files import read_small_json, why
from .targets import Targets, write_whole

PARTS = ("settings", "cases", "errors")


class Record:
    """OUT.json: `settings` of all its figures, `cases` by name, `errors` of those that failed and are tried again.

    Nothing is written before the first `keep`. Raises RequestError where no file can be written, ConfigError where there
    is one that is no record, or one of other settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        Targets({"out": path}, (), overwrite=True)
        self.path, self.failed, self._begun = path.absolute(), False, path.exists()
        self.values: dict[str, Any] = {"settings": dict(settings), "cases": {}, "errors": {}}
        if self._begun:
            self.values = _read(path)
            check_same(path, self.values["settings"], settings)

    def has(self, case: str, cards: int = 0) -> bool:
        """Whether it has been measured, on each of so many cards where `cards` says so."""
        return case in self.values["cases"] and len(self.values["cases"][case].get("cards", ())) >= cards

    def keep(self, case: str, result: Any, error: str | None, seconds: float) -> None:
        """Write one case down, and say it in a line. Raises ConfigError where that fails."""
        self.values["errors"].pop(case, None)
        if error is not None:
            self.failed = True
            self.values["errors"][case] = error
        else:
            self.values["cases"][case] = {"took": seconds, **result}
        told = error.strip().splitlines()[-1] if error else result["line"]
        print(f"{case:24} {told} ({seconds:.0f} s in all)", flush=True)
        try:
            write_whole(self.path, json.dumps(self.values, indent=1), overwrite=self._begun)
        except OSError as failure:
            raise ConfigError(f"out: {self.path} could not be written ({why(failure)}); name another file") from failure
        self._begun = True


def each_card(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The first card's figures, with the seconds of every card, all of which ran the same call at once, as in a mesh: so
    they share the host, its power and its cooling."""
    seconds = [result["seconds"] for result in results]
    told = f"; cards at once: {_listed(seconds)}" if len(seconds) > 1 else ""
    return {**results[0], "line": results[0]["line"] + told, "cards": seconds, "cards_ran": "at once"}


def beside_cards(result: Mapping[str, Any], world: int, one: Mapping[str, Any]) -> dict[str, Any]:
    """A call of `world` ranks, with how many times as fast it is as `one`: as the slowest of its cards, whose pace it has,
    where all of them were measured, and as the first one."""
    seconds, cards = result["seconds"], one.get("cards", [])[:world]
    times = {"slowest": max(cards) / seconds} if len(cards) == world else {}
    times["first"] = one["seconds"] / seconds
    told = f"{times['slowest']:.2f}x of the slowest card, " if "slowest" in times else ""
    told += f"{times['first']:.2f}x of the first" + (f" (alone {_listed(cards)})" if len(cards) == world else " card")
    return {**result, "line": f"{result['line']}; {told}", "times": times}


def beside_one(result: Mapping[str, Any], one: Mapping[str, Any]) -> dict[str, Any]:
    """A share beside one card's whole call: `ceiling`, how many times as fast the mesh can be at most."""
    ceiling = one["seconds"] / result["seconds"]
    return {**result, "line": f"{result['line']}; at most {ceiling:.2f}x of one card", "ceiling": ceiling}


def _listed(seconds: Sequence[float]) -> str:
    return " ".join(f"{value:.4f}" for value in seconds) + " s"


def _read(path: Path) -> dict[str, Any]:
    """A record. Raises ConfigError for every other file."""
    try:
        values = read_small_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"out: {path} is no record of this bench ({why(error)}); name another file") from None
    whole = isinstance(values, dict) and set(values) == set(PARTS) and all(isinstance(x, dict) for x in values.values())
    if not whole or not all(isinstance(case, dict) for case in values["cases"].values()):
        raise ConfigError(f"out: {path} is no record of this bench with its {', '.join(PARTS)}; name another file")
    return values


def check_same(path: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Refuse figures of other settings in one file. Raises ConfigError naming what differs."""
    names = [name for name in {**here, **there} if there.get(name) != here.get(name)]
    if names:
        was, now = (", ".join(f"{name} {values.get(name)}" for name in names) for values in (there, here))
        raise ConfigError(f"out: {path} has figures of {was}, and this run has {now}; name another file for it")


def base_path(out: Path) -> Path:
    """Where the velocities of one rank lie: `scaling.json` has `scaling.one.safetensors`."""
    return out.absolute().with_suffix(".one.safetensors")


def read_base(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors `video` and `audio` of one rank on the CPU, and their settings; both empty where there is no file.

    Raises ConfigError for a file of anybody else.
    """
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        return {}, {}
    try:
        with safe_open(path, "pt") as file:
            settings = json.loads(file.metadata()["scaling"])
            return {name: file.get_tensor(name) for name in ("video", "audio")}, settings
    except (OSError, SafetensorError, TypeError, KeyError, ValueError) as error:
        told = f"out: {path}, where one rank's result belongs, is another file ({why(error)})"
        raise ConfigError(f"{told}; move it, or give the record another name") from None


def write_base(path: Path, tensors: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Write what `read_base` reads, whole or not at all."""
    from safetensors.torch import save_file

    with replacing(path) as draft:
        save_file(dict(tensors), draft, metadata={"scaling": json.dumps(settings)})
