"""The time of a collective between GPUs, from bus bandwidths that were measured (`collectives.toml`)."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from preflop.hardware.device import Device
from preflop.timing.kernels import Curve, curve_from

if sys.version_info >= (3, 11) or TYPE_CHECKING:
    import tomllib
else:
    import tomli as tomllib

GPUS_PER_NODE = 8
_GB = 1e9


class Collective(str, Enum):
    """What ranks do together."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"

    @property
    def times_sent(self) -> int:
        """An all_reduce is a reduce_scatter and an all_gather."""
        return 2 if self is Collective.ALL_REDUCE else 1


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """How many GPUs, and what joins their nodes."""

    count: int
    network: str = ""
    """A network of `collectives.toml` that was measured."""
    link_bytes_per_s: float | None = None
    """Else the speed of one GPU's share of the network, as sold."""

    @property
    def nodes(self) -> int:
        """Nodes of eight GPUs."""
        return math.ceil(self.count / GPUS_PER_NODE)


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    text = (resources.files("preflop.timing") / "collectives.toml").read_text("utf-8")
    return tomllib.loads(text)


def collective_s(device: Device, what: Collective, message_bytes: float, ranks: Ranks) -> float | None:
    """Seconds of one collective; None where nobody measured links like these.

    Args:
        message_bytes: of the whole tensor (gathered, before it is scattered, reduced).

    Inside a node: bytes x (n - 1) / n over the bus bandwidth at this message's size. Between nodes what a node
    receives, bytes x (nodes - 1) / nodes, over its network, where that takes longer: rings enter each node once.

    >>> from preflop.hardware.catalog import find
    >>> a100 = find("a100-80gb")
    >>> gathered_s = [collective_s(a100, Collective.ALL_GATHER, 8e9, Ranks(count=n)) for n in (1, 2, 8)]
    >>> [round(seconds, 4) for seconds in gathered_s]
    [0.0, 0.0171, 0.0298]
    """
    if ranks.count == 1:
        return 0.0
    sent = message_bytes * what.times_sent
    if ranks.network:
        bus = _network(ranks.network, what).at(ranks.nodes) * _GB
        return sent * (ranks.count - 1) / ranks.count / bus
    curve = _inside(device, what)
    if curve is None or (ranks.nodes > 1 and ranks.link_bytes_per_s is None):
        return None
    on_node = min(ranks.count, GPUS_PER_NODE)
    inside_s = sent * (on_node - 1) / on_node / (curve.at(message_bytes) * _GB)
    if ranks.link_bytes_per_s is None or ranks.nodes == 1:
        return inside_s
    share = float(_table()["between_nodes"]["share"])
    node_bytes_per_s = GPUS_PER_NODE * ranks.link_bytes_per_s * share
    return max(inside_s, sent * (ranks.nodes - 1) / ranks.nodes / node_bytes_per_s)


def beside_s(computing_s: float, communicating_s: float, device: Device, ranks: Ranks) -> float:
    """Seconds of kernels and collectives that run at the same time.

    A collective's kernel has one block on each of its channels' multiprocessors and shares them with nobody, so others
    have the rest of the device while it runs. Source: `[multiprocessors]` of `collectives.toml`.

    >>> from preflop.hardware.catalog import find
    >>> round(beside_s(1.0, 0.5, find("a100-80gb"), Ranks(count=64)), 3)     # 16 of 108 are taken for half a second
    1.074
    >>> beside_s(0.1, 0.5, find("a100-80gb"), Ranks(count=64))
    0.5
    """
    if ranks.count == 1:
        return computing_s
    return max(computing_s + communicating_s * _taken_share(device, ranks), communicating_s)


def _taken_share(device: Device, ranks: Ranks) -> float:
    """Of the multiprocessors, while a collective runs; nothing where the catalog does not know how many there are."""
    figure = device.figures.get("unit_count")
    if figure is None:
        return 0.0
    taken = _table()["multiprocessors"]["inside_node" if ranks.nodes == 1 else "between_nodes"]
    return min(float(taken) / float(figure.value), 1.0)


def _inside(device: Device, what: Collective) -> Curve | None:
    """Bus bandwidth in GB/s inside a node, by message."""
    table = _table()
    own = table["devices"].get(table["same_links"].get(device.id, device.id))
    if own is None:
        return None
    points = own.get(what.value, own["all_reduce"])
    return curve_from(points, table["sources"][own["source"]])


def _network(name: str, what: Collective) -> Curve:
    """Bus bandwidth in GB/s by number of nodes."""
    found = _table()["networks"][name]
    return curve_from(found[what.value], _table()["sources"][found["source"]])


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """A fully sharded step of one microbatch: units gather their weights before they compute and scatter the sum of
    their gradients after."""

    units: int
    """Blocks that are gathered one by one, and the rest as one more."""
    gathered_bytes: float
    """Of all units' weights, as they are sent."""
    reduced_bytes: float
    """Of all gradients, as they are sent."""
    regathers: bool = True
    """Weights are freed after forward and gathered again for backward (FULL_SHARD; not SHARD_GRAD_OP)."""
    prefetches: bool = True
    """In backward the next unit is gathered while one computes (BACKWARD_PRE, FSDP2). Else after it (BACKWARD_POST):
    its gathering overlaps nothing that computes."""


def sharded_s(
    forward_s: float, backward_s: float, device: Device, sharding: Sharding, ranks: Ranks
) -> tuple[float, float] | None:
    """(forward, backward) seconds of one microbatch with what could not be hidden of its collectives.

    Units are taken as alike. Gathering runs ahead by one unit, so forward takes the longer of computing and
    gathering, and the first unit's gathering; backward the longer of computing and what overlaps it, and the last
    unit's scattering. None where nobody measured the links.
    """
    gather_s = collective_s(device, Collective.ALL_GATHER, sharding.gathered_bytes / sharding.units, ranks)
    scatter_s = collective_s(device, Collective.REDUCE_SCATTER, sharding.reduced_bytes / sharding.units, ranks)
    if gather_s is None or scatter_s is None:
        return None
    forward = beside_s(forward_s, gather_s * sharding.units, device, ranks) + gather_s
    regathered_s = gather_s * sharding.units if sharding.regathers else 0.0
    hidden_s = scatter_s * sharding.units + (regathered_s if sharding.prefetches else 0.0)
    exposed_s = 0.0 if sharding.prefetches else regathered_s
    return forward, beside_s(backward_s, hidden_s, device, ranks) + exposed_s + scatter_s
