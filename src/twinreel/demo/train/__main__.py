"""`python -m twinreel.demo.train PART --folder FOLDER --seconds N`: one resumable piece of the bundled model's training."""

from __future__ import annotations

import argparse
from pathlib import Path

SMOKE_STEPS = 3  # of an evaluation
PARTS = ("vae", "decoder", "audio", "dit", "export", "evaluate")


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and run one piece."""
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
    run(parser.parse_args(arguments))


def run(options: argparse.Namespace) -> None:
    """Run the chosen part."""
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
    main()
