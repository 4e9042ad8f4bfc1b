"""A program: run one request on a checkpoint and print what each stage took and was predicted to take, as JSON.

    python tests/peak_memory.py MODEL CASE OUTPUT.mp4

Its own process, because memory that one request used stays with the process.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch

from twinreel import Engine, EngineConfig, Picture, Reference, Request
from twinreel.planner import plan_request
from twinreel.watch import Event

CASES = {
    "target": Request("A cat.", duration=1.5, steps=2),
    "picture": Request(
        "<Picture 1>",
        references=(Reference("image", Picture(np.zeros((256, 256, 3), np.uint8))),),
        size=(64, 64),
        duration=1.0,
        steps=2,
    ),
}


class Peaks(threading.Thread):
    """Samples this process's resident bytes into the stage that runs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.stage, self.peaks, self.running = "start", {}, True

    def watch(self, event: Event) -> None:
        self.stage = event.stage

    def run(self) -> None:
        page = os.sysconf("SC_PAGE_SIZE")
        while self.running:
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * page
            self.peaks[self.stage] = max(self.peaks.get(self.stage, 0), resident)
            time.sleep(0.001)


def main(model: str, case: str, output: str) -> None:
    torch.set_num_threads(2)
    config = EngineConfig(model=model, device="cpu")
    predicted = plan_request(CASES[case], config)["memory"]["stages"]
    peaks = Peaks()
    peaks.start()
    Engine(config).render(CASES[case], output, None, peaks.watch)
    peaks.running = False
    peaks.join()
    print(json.dumps({stage: [peaks.peaks[stage], facts["host"], facts["work"]] for stage, facts in predicted.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
