"""`precision="fp8"` on the CPU: the word, the definition, the weights, the checkpoint, the engine.

The kernels are in `test_fp8_triton.py`, what only a device can show in `gpu/test_fp8.py`.
"""

from __future__ import annotations

from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8_cases as fp8
from fp8_cases import dit_of, engine, same_weights
from twinreel import Engine, EngineConfig, Request
from twinreel.errors import ConfigError
from twinreel.memory.estimate import Setting, part_weights
from twinreel.models.dit import DiT
from twinreel.models.quantized import QuantizedColumn, QuantizedRow, Stepwise, each_step
from twinreel.ops import quantized, select
from twinreel.parallel import Axis
from twinreel.planner import plan_request
from twinreel.precision import Fp8, check_weights, parse_precision
from twinreel.spec import DiTSpec, Spec
from twinreel.topology import check_choices
from twinreel.weights import locate, read_spec, stream
from twinreel.weights.stream import narrow

OPS = select()
ALL = "fp8:blocks=0"
SHORT = Request("A red circle.", steps=4, duration=0.9)


# ---- the word -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("auto", None), ("bf16", None), ("fp32", None), ("fp8", Fp8()), ("fp8:blocks=0", Fp8(0)),
        ("fp8:steps=3,blocks=1", Fp8(1, 3)), ("fp8:attention=bf16", Fp8(attention="bf16")),
    ],
)  # fmt: skip
def test_the_word_and_back(text: str, wanted: Fp8 | None) -> None:
    assert parse_precision(text) == (text.partition(":")[0], wanted)
    assert wanted is None or parse_precision(str(wanted))[1] == wanted


@pytest.mark.parametrize(
    "text",
    ["fp16", "int4", "bf16:blocks=1", "fp8:", "fp8:blocks", "fp8:blocks=-1", "fp8:blocks=1,blocks=2", "fp8:rows=1",
     "fp8:attention=fa3", "fp8:steps=1.5", "fp8:steps=9999", "fp8:blocks=²", "", None, 8],
)  # fmt: skip
def test_other_words_are_refused_by_name(text: object) -> None:
    with pytest.raises(ConfigError, match="^precision: "):
        parse_precision(text)


@pytest.mark.parametrize(
    ("precision", "dit", "words"),
    [
        ("fp8:blocks=25", DiTSpec(), "leaves none of 50 blocks in fp8; use blocks=0 to blocks=24"),
        ("fp8:blocks=3", DiTSpec(fp8_edge=2), "use blocks=2 or fewer"),
        ("fp8:steps=1", DiTSpec(fp8_edge=2), "needs bf16 weights of every block"),
        ("auto", DiTSpec(fp8_edge=2), "quantized to e4m3; use fp8:blocks=2"),
        ("bf16", DiTSpec(fp8_edge=0), "quantized to e4m3"),
        ("fp8", DiTSpec(ffn=14340), "multiples of 16, this DiT has ffn 14340"),
    ],
)
def test_what_cannot_be_is_refused_before_weights_are_read(precision: str, dit: DiTSpec, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_weights(precision, dit)


@pytest.mark.parametrize(
    ("precision", "dit"), [("fp8", DiTSpec()), ("fp8:blocks=0", DiTSpec(fp8_edge=2)), ("fp8:steps=24", DiTSpec())]
)
def test_what_can_be(precision: str, dit: DiTSpec) -> None:
    check_weights(precision, dit)


@pytest.mark.parametrize(
    ("weights", "precision", "residency", "words"),
    [
        ("tiny_original", "fp8:blocks=0,steps=1", "layers", "takes two in turn; leave steps out"),
        ("tiny_original", "fp8:blocks=0,steps=1", "mapped", "takes two in turn; leave steps out"),
        ("tiny_original", ALL, "mapped", "run twinreel quantize first, or use layers"),
        ("tiny_original", ALL, "layers", None),
        ("tiny_original", "fp8:blocks=0,steps=1", "conditioner", None),
        ("tiny_narrow", ALL, "mapped", None),
    ],
)
def test_the_door_and_the_engine_have_one_rule_for_the_residency(
    weights: str, precision: str, residency: str, words: str | None, request: pytest.FixtureRequest
) -> None:
    config = EngineConfig(
        model=str(request.getfixturevalue(weights)), device="cpu", precision=precision, residency=residency
    )
    for check in (Engine, lambda config: check_choices(config, read_spec(locate(config.model)))):
        with pytest.raises(ConfigError, match=f"^residency: {residency} .*{words}$") if words else nullcontext():
            check(config)


# ---- the definition -------------------------------------------------------------------------------------------------


def test_rows_keep_their_largest_value_and_lose_a_sixteenth_at_most() -> None:
    x = torch.randn(50, 96) * torch.logspace(-15, 20, 50).unsqueeze(1)
    made = OPS.quantize_rows(x)
    assert made.values.float().abs().amax(1).eq(448).all()
    back = made.values.float() * made.scale
    assert ((back - x).abs() <= x.abs() / 16 * 1.001 + made.scale * 2**-10).all()
    assert not OPS.quantize_rows(torch.zeros(2, 8)).values.float().any()


def test_a_product_is_that_of_the_values_meant() -> None:
    x, weight = torch.randn(30, 64), torch.randn(48, 64)
    rows, made = OPS.quantize_rows(x), OPS.quantize_rows(weight)
    meant = (rows.values.double() * rows.scale) @ (made.values.double() * made.scale).t()
    out = OPS.scaled_product(rows, made.values, made.scale)
    assert out.dtype == torch.bfloat16 and fp8.error(out, meant) < 3e-3
    assert 1e-2 < fp8.error(out, x @ weight.t()) < 5e-2


@pytest.mark.parametrize("size", fp8.HEADS, ids=str)
def test_attention_without_means_is_that_of_the_values(size: tuple[int, int, int, int]) -> None:
    rows, used, heads, dim = size
    qkv = fp8.draw_heads(rows, heads, dim, "cpu")
    wanted = OPS.attention(*(x.float() for x in qkv.unbind(2)), used)
    out = OPS.attention_quantized(OPS.quantize_heads(*qkv.unbind(2), used))
    assert out.shape == wanted.shape and not out[used:].any()
    assert fp8.error(out, wanted) < 2e-2
    if rows == 70:  # quantized with its means it is farther; with many rows what is left is the rounding of the result
        with_means = [OPS.quantize_rows(x[:used].float().transpose(0, 1).flatten(1)) for x in qkv.unbind(2)]
        back = [(x.values.float() * x.scale).view(heads, used, dim).transpose(0, 1) for x in with_means]
        assert fp8.error(OPS.attention(*back, used), wanted[:used]) > 1.5 * fp8.error(out, wanted)


def test_padding_has_no_part_in_any_maximum() -> None:
    fp8.check_heads(OPS, fp8.HEADS[1], "cpu")
    fp8.check_not_finite(OPS, "cpu")


def test_a_model_with_one_block_in_fp8() -> None:
    fp8.check_model("reference", "cpu")


def test_shards_add_up_to_the_whole() -> None:
    gate_value, down = torch.randn(32, 16).bfloat16(), torch.randn(16, 16).bfloat16()
    x = torch.randn(5, 16).bfloat16()
    total, parts = torch.zeros(5, 16), []
    for rank in range(2):
        axis = Axis("tp", size=2, rank=rank)
        column, row = (
            QuantizedColumn(16, 32, axis, torch.bfloat16, parts=2, ops=OPS),
            QuantizedRow(16, 16, axis, torch.bfloat16, ops=OPS),
        )
        for linear, whole in ((column, gate_value), (row, down)):
            made = narrow("weight", whole)
            linear.load_state_dict(
                {name: linear.shard(part) if name in linear.sharded else part for name, part in made.items()}
            )
        up = column(x)
        parts.append(up)
        assert torch.equal(column.columns(x, 3, 7), up[:, 3:7])
        hidden = OPS.swiglu(up)
        total += row.product(hidden, 0, 16).float()
    whole = QuantizedColumn(16, 32, Axis("tp"), torch.bfloat16, parts=2, ops=OPS)
    whole.load_state_dict(narrow("weight", gate_value))
    gates, values = (torch.cat([part.chunk(2, 1)[i] for part in parts], 1) for i in range(2))
    assert torch.equal(whole(x), torch.cat((gates, values), 1))
    assert fp8.error(total, OPS.swiglu(whole(x)).float() @ down.float().t()) < 6e-2


# ---- where it runs --------------------------------------------------------------------------------------------------


def test_the_cpu_emulates_and_says_so() -> None:
    table = quantized(OPS, "cpu")
    assert "emulated on the CPU" in table.why["fp8"] and table.why["fp8_attention"].startswith("fp8: emulated")
    assert table.scaled_product is OPS.scaled_product and table.attention is not OPS.attention
    apart = quantized(OPS, "cpu", "bf16")
    assert apart.attention is OPS.attention and apart.why["fp8_attention"] == "bf16: asked for"


def test_another_device_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="fp8 cannot run here: needs a CUDA device, not meta"):
        quantized(OPS, "meta")


@pytest.mark.parametrize(("capability", "works"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((10, 0), True)])
def test_cards_without_e4m3_are_refused_by_name(
    capability: tuple[int, int], works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from twinreel.ops import e4m3

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(e4m3, "_probe_product", lambda device: None)
    if works:
        table = quantized(OPS, "cuda")
        assert table.scaled_product is e4m3.scaled_mm and table.attention is OPS.attention
        assert table.why["fp8_attention"] == "bf16: only fa3 reads e4m3, this run has sdpa"
        with pytest.raises(ValueError, match="attention: only fa3"):
            quantized(OPS, "cuda", "fp8")
    else:
        with pytest.raises(ValueError, match=r"needs compute capability 8.9 \(Ada, Hopper, Blackwell\); a card has 8"):
            quantized(OPS, "cuda")


# ---- the engine -----------------------------------------------------------------------------------------------------


def test_the_choice_is_visible(tiny_original: Path, tiny_narrow: Path) -> None:
    made = engine(tiny_original, "fp8:blocks=0,steps=1,attention=bf16")
    facts = made.describe()
    assert facts["fp8"] == {
        "products": "emulated", "attention": "bf16", "blocks": "0 to 1 of 2",
        "steps": "all but the first and last 1", "weights": "quantized when loaded",
    }  # fmt: skip
    assert facts["dtypes"]["dit"] == "bfloat16" and "emulated" in facts["why"]["fp8"]
    assert engine(tiny_narrow, ALL).describe()["fp8"]["weights"] == "quantized by twinreel quantize"
    assert engine(tiny_original, "bf16").describe()["fp8"] is None
    assert engine(tiny_original, "auto").describe()["fp8"] is None, "never a default"


def test_first_and_last_steps_run_wide(tiny_original: Path) -> None:
    dit = dit_of(engine(tiny_original, "fp8:blocks=0,steps=1"))
    assert isinstance(dit, Stepwise)
    used = ["wide" if each is dit.wide else "narrow" for each in each_step(dit, 5)]
    assert used == ["wide", "narrow", "narrow", "narrow", "wide"]
    assert [each is dit.wide for each in each_step(dit, 1)] == [True]
    shared = {p.data_ptr() for p in dit.wide.parameters()} & {p.data_ptr() for p in dit.narrow.parameters()}
    assert len(shared) == len(list(dit.wide.parameters())) - 8, "all but the linears are there once"


def test_what_both_have_is_filled_once(tiny_original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the fullest moment of loading is that which is predicted."""
    made, put = list[int](), stream.assign
    monkeypatch.setattr(stream, "assign", lambda *where: made.append(where[-1].nbytes) or put(*where))
    found = engine(tiny_original, "fp8:blocks=0,steps=1")
    dit_of(found)
    setting = Setting("cpu", 2, 4, 1, "all", fp8=Fp8(0, 1))
    assert sum(made) == part_weights(found.spec, "dit:fl2va", setting).kept


def test_the_loop_takes_each_step_as_named(tiny_original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    run = DiT.forward

    def forward(self: DiT, *arguments: Any) -> Any:
        seen.append(isinstance(self.blocks[0].mlp.fc1, QuantizedColumn))
        return run(self, *arguments)

    monkeypatch.setattr(DiT, "forward", forward)
    engine(tiny_original, "fp8:blocks=0,steps=1").generate(SHORT)
    assert seen == [False, True, False]


def test_hosted_layers_have_the_bits_of_resident_ones(tiny_original: Path, tiny_narrow: Path) -> None:
    wanted = dit_of(engine(tiny_original, ALL))
    for path, residency in ((tiny_original, "layers"), (tiny_narrow, "layers"), (tiny_narrow, "mapped")):
        assert same_weights(wanted, dit_of(engine(path, ALL, residency=residency))), residency


def test_rows_in_chunks_have_the_same_bits(tiny_original: Path) -> None:
    x = torch.randn(40, 64).bfloat16()
    block = dit_of(engine(tiny_original, ALL)).blocks[0]
    rows = OPS.quantize_rows(x)
    whole = block.mlp._rows(rows)
    assert torch.equal(torch.cat([block.mlp._rows(rows[:16]), block.mlp._rows(rows[16:])]), whole)


def test_memory_is_planned_for() -> None:
    spec = Spec()
    setting = Setting("cuda", 2, 2, 4, "all")
    kept = {
        word: part_weights(spec, "dit:fl2va", replace(setting, fp8=parse_precision(word)[1])).kept / 2**30
        for word in ("bf16", ALL, "fp8", "fp8:blocks=0,steps=1")
    }
    linears = 50 * 5376 * (3 * 7168 + 7168 + 3 * 14336) / 2**30  # GiB of one byte each
    assert kept["bf16"] - kept[ALL] == pytest.approx(linears, rel=2e-3)
    assert kept["fp8"] - kept[ALL] == pytest.approx(linears * 4 / 50, rel=2e-3)
    assert kept["fp8:blocks=0,steps=1"] - kept["bf16"] == pytest.approx(linears, rel=2e-3), "both sets of weights"


@pytest.mark.parametrize(
    ("precision", "told"),
    [("fp8:blocks=0,steps=2", True), ("fp8:blocks=0,steps=1", False), ("fp8:blocks=0", False), ("bf16", False)],
)
def test_a_request_without_a_call_in_fp8_is_warned_of(tiny_original: Path, precision: str, told: bool) -> None:
    request, config = Request("a", steps=5, duration=0.9), EngineConfig(model=str(tiny_original), precision=precision)
    words = "steps=2 leaves none of this request's 4 calls in fp8"
    planned = plan_request(request, config)["warnings"]
    assert any(words in warning for warning in planned) is told
    with closing(Engine(replace(config, device="cpu"))) as engine:
        report = engine.generate(request).report
    assert any(words in warning for warning in report["plan"]["warnings"]) is told
