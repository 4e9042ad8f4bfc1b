"""Loading checkpoints: values, dtypes and memory of what is loaded, and the words for what is refused."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tiny import BUILD, build_dit, load, tiny_spec, write_tiny
from twinreel.errors import CheckpointError
from twinreel.weights import locate, read_spec, stream
from twinreel.weights.files import open_weights
from twinreel.weights.fingerprint import fingerprint
from twinreel.weights.stream import load_into

SHARED = {"text_encoder", "tokenizer", "processor", "video_vae", "audio_vae"}


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def rewrite(file: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


@pytest.fixture
def original(tiny_original: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return shutil.copytree(tiny_original, tmp_path / "original")


# ---- loading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [name for name in BUILD if name not in ("dit", "modulation")] + [
    f"{name}:{partition}" for name in ("dit", "modulation") for partition in ("fl2va", "ref2va")
])  # fmt: skip
def test_both_layouts_give_equal_modules(tiny_original: Path, tiny_diffusers: Path, part: str) -> None:
    ours, theirs = (load(locate(path), part).state_dict() for path in (tiny_original, tiny_diffusers))
    assert ours.keys() == theirs.keys() and len(ours) > 0
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_partitions_differ_and_must_be_named(tiny_original: Path) -> None:
    checkpoint = locate(tiny_original)
    first, second = (load(checkpoint, f"dit:{name}").state_dict() for name in ("fl2va", "ref2va"))
    assert not torch.equal(first["blocks.0.mlp.fc1.weight"], second["blocks.0.mlp.fc1.weight"])
    with pytest.raises(CheckpointError, match="no partition None; loaded are fl2va, ref2va"):
        load(checkpoint, "dit")


def test_values_dtypes_and_islands(tiny_original: Path) -> None:
    checkpoint = locate(tiny_original)
    stored: dict[str, torch.Tensor] = {}
    for file in (tiny_original / "FL2VA" / "transformer").glob("*.safetensors"):
        stored |= load_file(file)
    kept = load(checkpoint, "dit:fl2va")
    assert {name: value.dtype for name, value in kept.state_dict().items()} == {
        name: stored[name].dtype for name in kept.state_dict()
    }
    assert all(torch.equal(value, stored[name]) for name, value in kept.state_dict().items())
    with torch.device("meta"):
        upcast = build_dit(read_spec(checkpoint), torch.float32)
    load_into(upcast, checkpoint, read_spec(checkpoint), "dit:fl2va")
    assert all(torch.equal(value, stored[name].float()) for name, value in upcast.state_dict().items())
    low = load(checkpoint, "modulation:fl2va").state_dict()
    assert low["time_embedder.proj_in.weight"].dtype == torch.float32, "an island stays in a model that is in bf16"
    assert not kept.training and not any(value.requires_grad for value in kept.parameters())
    for value in kept.state_dict().values():
        assert value.data_ptr() % 64 == 0, "the allocator's alignment, not a file's (SPEC 13.9)"
        assert value.untyped_storage().nbytes() == value.nbytes, "memory of its own"


def test_hooks_are_called(tiny_original: Path) -> None:
    checkpoint = locate(tiny_original)
    encoder = load(checkpoint, "text_encoder")
    assert not any(buffer.is_meta for buffer in encoder.buffers())
    assert not any("weight_g" in name for name in load(checkpoint, "audio_decoder").state_dict()), "freeze() folds them"


def test_each_shard_is_opened_once(tiny_original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    plain = stream.opened
    monkeypatch.setattr(stream, "opened", lambda path, **how: opened.append(path.name) or plain(path, **how))
    load(locate(tiny_original), "dit:fl2va")
    assert len(opened) == len(set(opened)) == 3


def test_an_owner_takes_its_share(tiny_diffusers: Path) -> None:
    """A layer with `shard` gets the whole tensor in the original order and keeps what it returns."""
    checkpoint = locate(tiny_diffusers)
    spec = read_spec(checkpoint)
    with torch.device("meta"):
        module = BUILD["dit"](spec)
    owner = module.get_submodule("blocks.1.attn.qkv_proj")
    owner.shard = lambda whole: whole[96:]  # the second of two heads: rows of q, k, v
    owner.weight = nn.Parameter(torch.empty(96, 64, device="meta", dtype=torch.bfloat16))
    name = "blocks.1.attn.qkv_proj.weight"
    share = load_into(module, checkpoint, spec, "dit:fl2va").state_dict()[name]
    assert torch.equal(share, load(checkpoint, "dit:fl2va").state_dict()[name][96:])
    assert share.untyped_storage().nbytes() == share.nbytes


def test_weight_norm_in_torchs_new_spelling(original: Path) -> None:
    file = original / "FL2VA" / "audio_vae" / "model.safetensors"
    before = load(locate(original), "audio_encoder").state_dict()

    def respell(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            for old, new in (("weight_g", "original0"), ("weight_v", "original1")):
                if name.endswith(f".{old}"):
                    tensors[name.replace(old, f"parametrizations.weight.{new}")] = tensors.pop(name)

    rewrite(file, respell)
    after = load(locate(original), "audio_encoder").state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    rewrite(file, lambda tensors: tensors.update({"decoder.conv_post.weight_g": torch.ones(1, 1, 1)}))
    with pytest.raises(CheckpointError, match="both weight-norm spellings"):
        load(locate(original), "audio_encoder")


# ---- strictness -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("logs_proj.bias"), "1 problem:\n  logs_proj.bias: missing"),
        (lambda t: t.update(extra=torch.ones(2)), "extra: left over in model.safetensors"),
        (lambda t: t.update({"mean_proj.bias": torch.ones(31)}), r"mean_proj.bias: shape \[31\], \[32\] is needed"),
        (lambda t: t.update({"mean_proj.bias": torch.ones(32).half()}), "dtype float16, float32 is needed"),
        (lambda t: [t.pop(name) for name in list(t) if ".alpha" in name], r"\n  \.\.\. and \d+ more"),
    ],
)
def test_strict_both_ways(original: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str) -> None:
    rewrite(original / "FL2VA" / "audio_vae" / "model.safetensors", change)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(locate(original), "audio_decoder")
    assert len(str(caught.value).splitlines()) <= 12
    if "more" in message:
        found = re.search(r"(\d+) problems:.* and (\d+) more", str(caught.value), re.DOTALL)
        assert found is not None and int(found[1]) == int(found[2]) + 10 > 20


def shards_of(root: Path) -> list[Path]:
    return sorted((root / "FL2VA" / "transformer").glob("*.safetensors"))


def cut(root: Path) -> Path:
    file = shards_of(root)[1]
    file.write_bytes(file.read_bytes()[:-100])
    return file


def scramble(root: Path) -> Path:
    file = shards_of(root)[1]
    data = bytearray(file.read_bytes())
    data[8:20] = b"\xff" * 12
    file.write_bytes(data)
    return file


def cut_header(root: Path) -> Path:
    file = shards_of(root)[2]
    file.write_bytes(file.read_bytes()[:5])
    return file


def remove(root: Path) -> Path:
    shards_of(root)[2].unlink()
    return Path("model-00003-of-00003.safetensors")


def double(root: Path) -> Path:
    first, second, _ = shards_of(root)
    name, value = next(iter(load_file(second).items()))
    rewrite(first, lambda tensors: tensors.update({name: value}))
    return Path(f"{name} lies in")


def unlist(root: Path) -> Path:
    index = root / "FL2VA" / "transformer" / "model.safetensors.index.json"
    edit(index, lambda data: data["weight_map"].pop("blocks.0.norm1.weight"))
    return Path("blocks.0.norm1.weight lies in")


def drop_index(root: Path) -> Path:
    (root / "FL2VA" / "transformer" / "model.safetensors.index.json").unlink()
    return Path("3 safetensors files and no index")


@pytest.mark.parametrize("damage", [cut, scramble, cut_header, remove, double, unlist, drop_index])
def test_damaged_files_are_named(original: Path, damage: Callable[[Path], Path]) -> None:
    words = damage(original).name
    with pytest.raises(CheckpointError, match=re.escape(words)):
        load(locate(original), "dit:fl2va")


INDEXES = (
    ({"metadata": None}, "metadata: an object is needed, got None"),
    ({"metadata": []}, r"metadata: an object is needed, got \[\]"),
    *(
        ({"metadata": {"total_size": bad}}, "metadata.total_size: a number of bytes is needed")
        for bad in ("5", [], True, -1, 0.5, float("inf"), float("nan"), 10**400)
    ),
    ({"weight_map": {}}, "has no weight_map"),
    ({"weight_map": []}, "has no weight_map"),
    *(
        ({"weight_map": {"x": bad}}, "shard .* is no plain")
        for bad in (5, None, [], "", "..", "a/b.safetensors", "\0.safetensors", "\ud800.safetensors", "config.json")
    ),
    ({"weight_map": {"x": "y" * 5000 + ".safetensors"}}, "x': shard 'y{20,30}.*safetensors' is no plain"),
    ({"weight_map": {"x": "y.safetensors"}}, "1 of 1 shards are absent: y.safetensors"),
)


@pytest.mark.parametrize(("values", "message"), INDEXES)
def test_damaged_indexes(original: Path, values: dict[str, Any], message: str) -> None:
    folder = original / "FL2VA" / "transformer"
    edit(folder / "model.safetensors.index.json", lambda data: data.update(values))
    with pytest.raises(CheckpointError, match=rf"model.safetensors.index.json: .*{message}"):
        open_weights(folder)


def test_a_total_that_is_a_float(original: Path) -> None:
    folder = original / "FL2VA" / "transformer"
    total = open_weights(folder).total_bytes
    edit(folder / "model.safetensors.index.json", lambda data: data["metadata"].update(total_size=float(total)))
    assert open_weights(folder).declared_bytes == total


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("shape", bad) for bad in (None, "32", [32.0], [-1, -32], [True], [float("inf")], [[32]], {}, [2**70])),
        *(("dtype", bad) for bad in (None, [], 5, {})),
        *(
            ("data_offsets", bad)
            for bad in (None, [], [0], [0, 1, 2], [0.0, 128.0], ["0", "128"], [-128, 0], [5, 4], {})
        ),
    ],
)
def test_damaged_header_entries(original: Path, name: str, value: Any) -> None:
    file = original / "FL2VA" / "audio_vae" / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["mean_proj.bias"][name] = value
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*mean_proj\.bias"):
        open_weights(file.parent)


def test_zero_size_and_scalar_tensors_are_read(tmp_path: Path) -> None:
    save_file({"none": torch.empty(0, 3), "one": torch.tensor(2.5)}, tmp_path / "model.safetensors")
    files = open_weights(tmp_path)
    found = dict(stream.read_tensors(files, files.entries))
    assert found["none"].shape == (0, 3) and found["one"].item() == 2.5


# ---- memory ---------------------------------------------------------------------------------------------------------

MEASURE = """
import sys, torch
from pathlib import Path
from tiny import build_dit
from twinreel.weights import locate, read_spec
from twinreel.weights.files import open_weights
from twinreel.weights.stream import load_into, read_tensors

def status(field):
    line = next(line for line in open("/proc/self/status") if line.startswith(field))
    return int(line.split()[1]) * 1024

root = Path(sys.argv[1])
checkpoint = locate(root)
spec = read_spec(checkpoint)
with torch.device("meta"):
    module = build_dit(spec, getattr(torch, sys.argv[2]))
torch.ones(1000).bfloat16().float().sum()
files = open_weights(checkpoint.component("dit", "fl2va").weights)
shard = max(path.stat().st_size for path in files.shards)
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
if sys.argv[3] == "naive":
    everything = list(read_tensors(files, files.entries))
load_into(module, checkpoint, spec, "dit:fl2va")
stays = sum(value.nbytes for value in module.parameters())
print(status("VmHWM") - before, shard, stays)
"""


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The miniature with a DiT of some 45 MB in both layouts."""
    spec = tiny_spec()
    spec = replace(spec, dit=replace(spec.dit, hidden=384, layers=6, heads=12, ffn=1536, time_dim=16))
    folder = tmp_path_factory.mktemp("larger")
    return {layout: write_tiny(folder / layout, layout, spec) for layout in ("original", "diffusers")}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures the peak through Linux's /proc")
@pytest.mark.parametrize(
    ("layout", "dtype", "how"),
    [("original", "bfloat16", "load"), ("diffusers", "float32", "load"), ("original", "bfloat16", "naive")],
)
def test_host_peak(larger: dict[str, Path], layout: str, dtype: str, how: str) -> None:
    """Peak over the start <= 1.3 x largest shard + what stays; reading all tensors first must be seen to fail."""
    source = Path(__file__).resolve().parents[1] / "src"
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(larger[layout]), dtype, how],
        capture_output=True, text=True, check=True, env={"PYTHONPATH": f"{source}:{Path(__file__).parent}", "PATH": ""},
    )  # fmt: skip
    peak, shard, stays = (int(word) for word in done.stdout.split())
    assert stays > 3 * shard / 2, "sized so that holding everything twice would show"
    assert (peak <= 1.3 * shard + stays) == (how == "load"), f"peak {peak}, shard {shard}, stays {stays}"


# ---- identity -------------------------------------------------------------------------------------------------------


def test_swapped_names_are_other_weights(original: Path) -> None:
    """Two tensors of one shape, whose names stand far behind the start of a long header."""
    component = locate(original).component("audio_vae")
    file, before = component.weights / "model.safetensors", fingerprint(component)
    data = file.read_bytes()
    one, other = (b'"decoder.resblocks.10.convs%d.1.weight_g"' % number for number in (1, 2))
    assert data.index(one) > 4096 and data.index(other) > 4096
    start, end = sorted((data.index(one), data.index(other)))
    file.write_bytes(
        data[:start]
        + data[end : end + len(one)]
        + data[start + len(one) : end]
        + data[start : start + len(one)]
        + data[end + len(one) :]
    )
    assert len(data) == file.stat().st_size and fingerprint(component) != before
