"""`python -m twinreel.demo.train PART --folder FOLDER --seconds N`: one resumable piece of the bundled model's training."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from ...complaint import explain
from ...config import EngineConfig, check_config, cuda_number
from ...errors import ConfigError, TwinreelError

SMOKE_STEPS = 3  # of an evaluation
PARTS = ("vae", "decoder", "audio", "dit", "export", "evaluate")


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run one piece. Exit codes are those of `twinreel`; what refuses it is said in three
    lines, and the folder is then as it was."""
    parser = argparse.ArgumentParser(prog="python -m twinreel.demo.train", description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--folder", type=Path, default=Path("out/train"), help="state is read from and written to here")
    parser.add_argument("--seconds", type=float, default=480.0, help="wall clock of this piece, preparation included")
    parser.add_argument("--begin", type=float, default=0.0, help="share of the whole run at which this piece begins")
    parser.add_argument("--end", type=float, default=1.0, help="and ends")
    parser.add_argument("--steps", type=int, help="end after so many steps instead of seconds")
    parser.add_argument("--device", default="auto", help="evaluate takes several, parted by commas")
    parser.add_argument("--workers", type=int, default=1, help="evaluate: processes, on the devices in turn")
    parser.add_argument("--smoke", action="store_true", help="narrow sizes, two scenes; evaluate: one trial, few steps")
    parser.add_argument("--model", type=Path, help="export: where to; evaluate: what to judge")
    parser.add_argument(
        "--count", type=int, default=200, help="evaluate: prompts of text; an eighth of that of each other task"
    )
    options = parser.parse_args(arguments)
    if problem := _problem(options):
        parser.error(problem)
    try:
        run(options)
    except (TwinreelError, OSError) as error:
        print(explain(error, command="demo.train"), file=sys.stderr)
        return getattr(error, "exit_code", 1)
    return 0


def _problem(options: argparse.Namespace) -> str | None:
    """What is wrong with the flags."""
    import torch

    if not 0 < options.seconds < math.inf:
        return f"--seconds: got {options.seconds}; give a finite number above 0"
    for name in ("steps", "count", "workers"):
        if (value := getattr(options, name)) is not None and value < 1:
            return f"--{name}: got {value}; give 1 or more"
    if not 0 <= options.begin < options.end <= 1:
        return f"--begin, --end: got {options.begin} and {options.end}; give shares of the run, 0 <= begin < end <= 1"
    for name in ("folder", "model"):
        path = getattr(options, name)
        if path is not None and path.exists() and not path.is_dir():
            return f"--{name}: {path} is no folder; name one"
    words = options.device.split(",")
    if len(words) > 1 and options.part != "evaluate":
        return f"--device: got {options.device}; {options.part} runs on one, only evaluate takes several"
    try:
        for word in words:
            check_config(EngineConfig(device=word))
            cuda_number(word, torch.cuda.device_count())
    except ConfigError as error:
        return f"--{error}"
    return None


def run(options: argparse.Namespace) -> None:
    """Run the chosen part. Raises CheckpointError for a state that cannot be gone on from, and what engines raise."""
    import torch

    from ..recipe import release, smoke
    from . import audio, dit, export, video
    from .loop import Piece

    recipe = smoke() if options.smoke else release()
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    named = auto if options.device == "auto" else options.device
    device = torch.device(named.partition(",")[0])
    if device.type == "cuda":
        # Training only: products of float32 tensors in TF32, and the fastest convolution found by trying.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = options.part in ("vae", "decoder", "audio")
        torch.backends.cudnn.benchmark_limit = 4
        # cuDNN's attention plans anew for every number of rows, which costs more than its speed brings here.
        torch.backends.cuda.enable_cudnn_sdp(False)
    torch.manual_seed(round(options.begin * 1000))
    piece = Piece(options.folder, options.seconds, options.begin, options.end, options.steps)
    if options.part == "export":
        export.write_model(options.model or options.folder / "model", recipe, options.folder)
    elif options.part == "evaluate":
        from ..evaluate import main as evaluate

        model, path = options.model or options.folder / "model", options.folder / "evaluation.json"
        count, steps = (1, SMOKE_STEPS) if options.smoke else (options.count, None)
        evaluate(model, path, count, named.split(","), options.workers, steps)
    else:
        trainers = {"vae": video.train, "decoder": video.train_decoder, "audio": audio.train, "dit": dit.train}
        trainers[options.part](recipe, piece, device)


if __name__ == "__main__":
    sys.exit(main())
