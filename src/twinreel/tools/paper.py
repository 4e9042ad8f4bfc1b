"""The paper model of several GPUs: one call of the released DiT from its work, its bytes and measured rates.

`python -m twinreel.tools.paper` prints the table of docs/performance.md.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from ..spec import DiTSpec

SHARD_ROWS = 64
BF16 = 2
MESHES = ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (1, 4))  # sp, tp


@dataclass(frozen=True)
class Rates:
    """What one H200, and two of them over NVLink, were measured to do. Rates in units a second.

    products, attention: FLOP. rest: seconds of one GPU's call that are neither. there, back: bytes to one peer by NCCL's
    all-to-all (409 and 136 MB), pushed: by a copy into its memory, reduce: of an all-reduce, each of one rank. drag:
    seconds that products lose for each second of a copy beside them.
    """

    products: float = 691e12
    attention: float = 668e12
    rest: float = 5.415 - 2.0712e15 / 668e12 - 1.4647e15 / 691e12
    there: float = 327e9
    back: float = 280e9
    pushed: float = 391e9
    reduce: float = 307e9
    drag: float = (3.09 - 2.80) / 1.05


@dataclass(frozen=True)
class Call:
    """Seconds of one call: computed; all-to-all on its way, of these exposed; what copies beside products cost them;
    all-reduces. And bytes that a rank sends."""

    compute: float
    exchange: float
    exposed: float
    drag: float
    reduce: float
    bytes: float

    @property
    def seconds(self) -> float:
        """The whole call."""
        return self.compute + self.exposed + self.drag + self.reduce

    @property
    def hidden(self) -> float:
        """The share of the all-to-all that something is computed beside."""
        return 1 - self.exposed / self.exchange if self.exchange else 0.0


def predict(sp: int, tp: int, chunks: int = 1, *, rows: int = 38_010, rates: Rates | None = None) -> Call:
    """One call over sp * tp GPUs. chunks: 1 for one all-to-all there and one back, more for pushed chunks of heads.

    Assumed: every GPU of a host sends at the rate measured between two; ranks are never late; padding counts.
    """
    dit, rates = DiTSpec(), rates or Rates()
    ranks, mine = sp * tp, -(-rows // (SHARD_ROWS * sp)) * SHARD_ROWS if sp > 1 else rows
    widths = dit.hidden * 3 * dit.inner, dit.inner * dit.hidden + 3 * dit.hidden * dit.ffn
    qkv, others = (2 * mine * width / tp / rates.products for width in widths)
    attention = 4 * rows * rows * dit.inner / ranks / rates.attention
    # what reads and writes whole rows, divided by the ranks that share rows
    compute = dit.layers * (qkv + others + attention) + rates.rest / sp
    back = BF16 * mine * dit.inner / tp * (sp - 1) / sp
    summed = BF16 * mine * dit.hidden * 2 * 2 * (tp - 1) / tp
    if chunks == 1:
        exchange = exposed = 3 * back / rates.there + back / rates.back
    else:
        exchange = 4 * back / rates.pushed
        exposed = _exposed(qkv, attention, 3 * back / rates.pushed, back / rates.pushed, chunks)
    drag, reduce = rates.drag * (exchange - exposed), summed / rates.reduce
    return Call(compute, *(dit.layers * x for x in (exchange, exposed, drag, reduce, 4 * back + summed)))


def _exposed(product: float, attention: float, there: float, back: float, chunks: int) -> float:
    """Seconds of a block in which nothing is computed because heads are on their way, one chunk after the other."""
    now = side = 0.0
    arrived = []
    for _ in range(chunks):
        now += product / chunks
        side = max(side, now) + there / chunks
        arrived.append(side)
    for there_at in arrived:
        now = max(now, there_at) + attention / chunks
        side = max(side, now) + back / chunks
    return max(now, side) - product - attention


def table() -> str:
    """Markdown: every mesh, plain and overlapped in two chunks."""
    one = predict(1, 1).seconds
    heads = "GPUs", "compute, s", "sent a rank, GB", "plain, s", "overlapped, s", "hidden", "times one GPU"
    rows = [heads, ("---",) * len(heads)]
    for sp, tp in MESHES:
        plain, pushed = predict(sp, tp), predict(sp, tp, 2)
        best = f"{pushed.seconds:.3f}" if sp > 1 else ""
        hidden = f"{pushed.hidden:.0%}" if sp > 1 else ""
        sizes = (f"SP{sp}" if sp > 1 or tp == 1 else "", f"TP{tp}" if tp > 1 else "")
        figures = f"{plain.compute:.3f}", f"{plain.bytes / 1e9:.1f}", f"{plain.seconds:.3f}", best, hidden
        rows.append((" x ".join(filter(None, sizes)), *figures, f"{one / pushed.seconds:.2f}"))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
