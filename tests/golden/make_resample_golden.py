"""Golden values of torchaudio's default `Resample(rate, 32000)`, for tests/test_resample.py.

    pip install --no-deps --target /tmp/torchaudio 'torchaudio==2.9.1'
    python tests/golden/make_resample_golden.py /tmp/torchaudio

torchaudio's compiled part is tied to one torch build, its resampler is plain Python: the script puts an empty module
in the place of the compiled part, so that the values come from the same torch as ours.
"""

import hashlib
import importlib
import json
import sys
import types
from pathlib import Path

import torch

RATES = (8000, 11025, 16000, 22050, 24000, 44100, 48000, 96000)
SAMPLES = 3001
SEED = 11


def main(folder: str) -> None:
    sys.path.insert(0, folder)
    sys.modules["torchaudio"] = package = types.ModuleType("torchaudio")
    package.__path__ = [f"{folder}/torchaudio"]
    sys.modules["torchaudio._extension"] = extension = types.ModuleType("torchaudio._extension")
    for name in ("_IS_TORCHAUDIO_EXT_AVAILABLE", "_IS_RIR_AVAILABLE", "_IS_ALIGN_AVAILABLE"):
        setattr(extension, name, False)
    for name in ("fail_if_no_align", "fail_if_no_rir"):
        setattr(extension, name, lambda function: function)
    transforms = importlib.import_module("torchaudio.transforms._transforms")
    torch.set_num_threads(2)
    waveform = torch.randn(2, SAMPLES, generator=torch.Generator().manual_seed(SEED)) * 0.3
    values = {}
    for rate in RATES:
        out = transforms.Resample(rate, 32000)(waveform)
        values[str(rate)] = {
            "length": out.shape[1],
            "sum": float(out.double().sum()),
            "sum_of_squares": float((out.double() ** 2).sum()),
            "every_97th": out[:, ::97].tolist(),
            "sha256": hashlib.sha256(out.contiguous().numpy().tobytes()).hexdigest(),
        }
    about = {"torchaudio": "2.9.1", "torch": torch.__version__, "samples": SAMPLES, "seed": SEED, "rates": values}
    Path(__file__).with_name("resample.json").write_text(json.dumps(about) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
