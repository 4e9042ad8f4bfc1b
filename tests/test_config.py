"""The operator's choices: what is refused, what `auto` picks, which flags are set."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from twinreel import ops
from twinreel.config import EngineConfig, check_config, check_one_device, resolve, set_flags
from twinreel.errors import ConfigError
from twinreel.launch import Seat


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (EngineConfig(precision="fp16"), "65,504"),
        (EngineConfig(precision="int4"), "auto, bf16, fp32"),
        (EngineConfig(vae_encode="fp8"), "fp32, tf32"),
        (EngineConfig(residency="some"), "auto, all, conditioner, stages, layers, mapped"),
        (EngineConfig(components={"unet": "x"}), "transformer_ref"),
        (EngineConfig(threads=0), "1 to 1024"),
        (EngineConfig(threads=True), "1 to 1024"),
    ],
)
def test_refused_without_torch_being_asked(config: EngineConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_config(config)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (EngineConfig(device="tpu"), "cuda:N"),
        (EngineConfig(device="meta"), "cuda:N"),
        (EngineConfig(device="cuda:99"), "CUDA devices"),
        (EngineConfig(device="cpu", vae_encode="tf32"), "needs a CUDA device"),
        (EngineConfig(device="cpu", vae_encode="fp16"), "fp16 needs a CUDA device"),
        (EngineConfig(device="cpu", ops="fastest"), "reference"),
        (EngineConfig(device="cpu", attention="fastest"), "^attention: got 'fastest'; use auto.*cudnn"),
        (EngineConfig(device="cpu", attention="fa3"), "needs a CUDA device"),
        (EngineConfig(device="cpu", adaln="maybe"), "live, precompute"),
    ],
)
def test_refused_on_this_machine(config: EngineConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(config)


def test_paths_and_numbers_of_other_libraries_are_pythons_own() -> None:
    given = {"model": Path("w"), "components": {"transformer": Path("t")}, "threads": np.int64(2), "host_memory": 3}
    config = EngineConfig(**given)  # type: ignore[arg-type]
    check_config(config)
    assert (config.model, config.components, config.threads) == ("w", {"transformer": "t"}, 2)
    assert type(config.threads) is int


def test_auto_on_cpu() -> None:
    choices = resolve(EngineConfig(device="cpu"))
    assert (choices.device.type, choices.dtype, choices.vae_compute) == ("cpu", torch.float32, torch.float32)
    assert choices.ops.name == "reference" and choices.threads == torch.get_num_threads()
    assert set(choices.why) == {"device", "precision", "ops", "attention", "vae_decode", "threads"}
    assert resolve(EngineConfig(device="cpu", precision="bf16")).dtype == torch.bfloat16


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that says it has two GPUs; nothing is run on them."""
    table = ops.select("reference", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(ops, "select", lambda *_, **__: table)


@pytest.mark.parametrize("gpus", [2, None], ids=["started here", "by a launcher"])
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_every_rank_has_a_card_and_a_share_of_the_threads(two_cards: None, device: str, gpus: int | None) -> None:
    config = EngineConfig(device=device, gpus=gpus)
    for rank in range(2):
        choices = resolve(config, place=Seat(rank, 2, rank, 2))
        assert choices.device == torch.device("cuda", rank)
        assert choices.threads == max(1, torch.get_num_threads() // 2)
        assert choices.why["device"] == ("asked for" if device == "cuda" else "CUDA is available")
        assert choices.why["threads"] == "PyTorch's own count, shared by the ranks"
    with pytest.raises(
        ConfigError, match="gpus: 3 ranks need a CUDA device each, and this machine shows 2; take fewer"
    ):
        resolve(replace(config, gpus=gpus and 3), place=Seat(2, 3, 2, 3))
    on_cpu = resolve(replace(config, device="cpu", threads=5), place=Seat(2, 3, 2, 3))
    assert (on_cpu.device.type, on_cpu.threads) == ("cpu", 5)


@pytest.mark.parametrize("gpus", [2, None], ids=["started here", "by a launcher"])
def test_one_card_is_not_for_several_ranks(two_cards: None, gpus: int | None) -> None:
    with pytest.raises(ConfigError, match=r"device: got 'cuda:1' for 2 ranks; use auto, cuda or cpu"):
        check_one_device(EngineConfig(device="cuda:1", gpus=gpus), 2)
    assert resolve(EngineConfig(device="cuda:1")).device == torch.device("cuda", 1)


def test_flags_are_set_and_recorded() -> None:
    choices = resolve(EngineConfig(device="cpu", threads=2))
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = True
    flags = set_flags("denoise", choices)
    assert not torch.backends.cudnn.benchmark and not torch.backends.cuda.matmul.allow_tf32
    assert torch.get_num_threads() == flags["threads"] == 2
    assert flags["convolution_tf32"] is torch.backends.cudnn.allow_tf32 is False


@pytest.mark.parametrize("kind", ["fp32", "tf32", "fp16"])
def test_only_tf32_rounds_the_factors_of_an_encode(kind: str) -> None:
    """The convolutions in fp32 may be products (`ops.winograd`): neither may run in TF32."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    flags = set_flags("encode", replace(resolve(EngineConfig(device="cpu")), vae_encode=kind))
    assert torch.backends.cuda.matmul.allow_tf32 is flags["matmul_tf32"] is False
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.cudnn.allow_tf32 is flags["convolution_tf32"] is (kind == "tf32")


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"model": 5}, "model"), ({"model": b"/x"}, "model"), ({"model": ""}, "model"),
        ({"components": None}, "components"), ({"components": {"transformer": 5}}, "components"),
        ({"device": None}, "device"), ({"ops": []}, "ops"),
        ({"attention": []}, "attention"), ({"threads": "2"}, "threads"), ({"threads": 2.0}, "threads"),
        ({"components": []}, "components"), ({"components": "x"}, "components"), ({"components": {5: "x"}}, "components"),
    ],
)  # fmt: skip
def test_values_of_other_types_are_refused_by_name(given: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}"):
        check_config(EngineConfig(**given))  # type: ignore[arg-type]


@pytest.mark.parametrize("config", ["weights", {}, 0, {"model": "weights"}, EngineConfig])
def test_an_engine_takes_a_config(config: object) -> None:
    from twinreel import Engine

    with pytest.raises(ConfigError, match="^config: .*give an EngineConfig"):
        Engine(config)  # type: ignore[arg-type]
