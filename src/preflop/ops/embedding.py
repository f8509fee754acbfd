"""Lookups and scatters: what they add up, and that they touch only the rows that indices name."""

from __future__ import annotations

from preflop.ops.arguments import argument, need, tensor
from preflop.ops.moved import distinct_bytes, general
from preflop.ops.registry import Kind, Moved, Work, flops, traffic
from preflop.tape.events import Ref, Signature, TensorMeta


def _other(count: int) -> Work:
    return Work(count, Kind.OTHER)


@flops("aten.embedding_dense_backward", "aten.embedding_sparse_backward", "aten.embedding_backward")
def embedding_backward(sig: Signature) -> Work:
    """FLOPs of adding each looked-up row's gradient to its row: one per gradient element."""
    return _other(need(sig, 0, "grad_output").elements)


@flops("aten._embedding_bag", "aten._embedding_bag_forward_only", "aten.embedding_bag")
def embedding_bag(sig: Signature) -> Work:
    """FLOPs of adding up the rows of each bag: one per gathered element, two with per-sample weights."""
    weighted = tensor(sig, 6, "per_sample_weights") is not None
    gathered = need(sig, 1, "indices").elements * need(sig, 0, "weight").shape[-1]
    return _other((2 if weighted else 1) * gathered)


@flops(
    "aten._embedding_bag_backward",
    "aten._embedding_bag_dense_backward",
    "aten._embedding_bag_sparse_backward",
    "aten._embedding_bag_per_sample_weights_backward",
)
def embedding_bag_backward(sig: Signature) -> Work:
    """FLOPs of adding a bag's gradient to each of its rows: one per gathered element."""
    grad = need(sig, 0, "grad")
    return _other(need(sig, 1, "indices").elements * grad.shape[-1])


@flops(
    "aten.scatter_add",
    "aten.scatter_add_",
    "aten.scatter_reduce",
    "aten.scatter_reduce_",
    "aten.index_add",
    "aten.index_add_",
    "aten.index_reduce",
    "aten.index_reduce_",
)
def scatter_add(sig: Signature) -> Work:
    """FLOPs of adding scattered elements: one per element of the source."""
    return _other(need(sig, 3, "src").elements)


@flops(
    "aten.index_put",
    "aten.index_put_",
    "aten._index_put_impl_",
    "aten._unsafe_index_put",
    "aten._unsafe_masked_index_put_accumulate",
)
def index_put(sig: Signature) -> Work:
    """FLOPs of writing (none) or accumulating (one per value) at indices."""
    adds = bool(argument(sig, 3, "accumulate", False)) or "accumulate" in sig.op
    return _other(_addressed(sig) if adds else 0)


@flops("aten.col2im")
def columns_to_image(sig: Signature) -> Work:
    """FLOPs of adding overlapping columns into an image: one per column element."""
    return _other(need(sig, 0, "self").elements)


@flops(
    "aten.reflection_pad1d_backward",
    "aten.reflection_pad2d_backward",
    "aten.reflection_pad3d_backward",
    "aten.replication_pad1d_backward",
    "aten.replication_pad2d_backward",
    "aten.replication_pad3d_backward",
)
def pad_backward(sig: Signature) -> Work:
    """FLOPs of folding the padding's gradient back: one per gradient element."""
    return _other(need(sig, 0, "grad_output").elements)


def _indices(sig: Signature, position: int) -> list[TensorMeta]:
    value = argument(sig, position, "indices", ())
    return [sig.inputs[item.index] for item in value if isinstance(item, Ref)]


def _addressed(sig: Signature) -> int:
    """Elements that an index_put addresses: those of `values`, broadcast over the indexed shape where
    the indices are integers (of a boolean mask, only the values tell)."""
    values = need(sig, 2, "values")
    target = need(sig, 0, "self")
    given = argument(sig, 1, "indices", ())
    if not isinstance(given, tuple | list) or not given:
        return values.elements
    metas = _indices(sig, 1)
    if any(meta.dtype in ("bool", "uint8") for meta in metas):
        return values.elements
    points = max((meta.elements for meta in metas), default=1)
    kept = 1
    for axis, size in enumerate(target.shape):
        named = axis < len(given) and given[axis] is not None
        kept *= 1 if named else size
    return max(values.elements, points * kept)


def _gathered(sig: Signature, read: int) -> Moved:
    """A gather that reads `read` bytes and writes its outputs."""
    return Moved(read, sum(distinct_bytes(meta) for meta in sig.outputs))


@traffic(
    "aten.embedding",
    "aten.index_select",
    "aten.gather",
    "aten.take",
    "aten.take_along_dim",
    "aten.index",
    "aten._unsafe_index",
    "aten.masked_select",
)
def gather_moved(sig: Signature) -> Moved:
    """Indices are read, and as many source bytes as there are results; results are written.

    Rows named twice are counted twice (which are is data); the source is never read more than once
    over.
    """
    source = sig.inputs[0]
    indices = sum(distinct_bytes(meta) for meta in sig.inputs[1:])
    rows = sum(meta.elements for meta in sig.outputs) * source.itemsize
    return _gathered(sig, indices + rows)


@traffic("aten._embedding_bag", "aten._embedding_bag_forward_only", "aten.embedding_bag")
def embedding_bag_moved(sig: Signature) -> Moved:
    """The gathered rows and everything else given are read; outputs are written."""
    weight, indices = need(sig, 0, "weight"), need(sig, 1, "indices")
    rows = indices.elements * weight.shape[-1] * weight.itemsize
    given = general(sig)
    return Moved(given.read_bytes - distinct_bytes(weight) + rows, given.write_bytes)


@traffic("aten.nll_loss_forward", "aten.nll_loss2d_forward")
def nll_loss_moved(sig: Signature) -> Moved:
    """One score per target is read, not all of them."""
    scores, target = need(sig, 0, "self"), need(sig, 1, "target")
    given = general(sig)
    return Moved(
        given.read_bytes - distinct_bytes(scores) + target.elements * scores.itemsize, given.write_bytes
    )


@traffic("aten.nll_loss_backward", "aten.nll_loss2d_backward")
def nll_loss_backward_moved(sig: Signature) -> Moved:
    """The scores' values are not read (only their shape); the whole gradient is written."""
    given = general(sig)
    return Moved(given.read_bytes - distinct_bytes(need(sig, 1, "self")), given.write_bytes)


def _scattered(sig: Signature, index_bytes: int, source: int, adds: bool) -> Moved:
    """A scatter of `source` bytes into its first input. In place only the addressed elements move;
    out of place the rest is copied."""
    target = sig.inputs[0]
    element_bytes = source
    if sig.writes:
        return Moved(index_bytes + source + (element_bytes if adds else 0), element_bytes)
    whole = distinct_bytes(target)
    return Moved(index_bytes + source + whole, sum(distinct_bytes(meta) for meta in sig.outputs))


@traffic(
    "aten.scatter_add",
    "aten.scatter_add_",
    "aten.index_add",
    "aten.index_add_",
    "aten.scatter_reduce",
    "aten.scatter_reduce_",
    "aten.scatter",
    "aten.scatter_",
    "aten.index_copy",
    "aten.index_copy_",
)
def scatter_moved(sig: Signature) -> Moved:
    """Index and source are read, the addressed elements written (and read where they are added to)."""
    index, source = need(sig, 2, "index"), tensor(sig, 3, "src")
    values = index.elements * sig.inputs[0].itemsize if source is None else distinct_bytes(source)
    return _scattered(sig, distinct_bytes(index), values, "add" in sig.op or "reduce" in sig.op)


@traffic("aten.index_put", "aten.index_put_", "aten._index_put_impl_", "aten._unsafe_index_put")
def index_put_moved(sig: Signature) -> Moved:
    """Indices and values are read, the addressed elements written (and read when accumulating)."""
    indices = sum(distinct_bytes(meta) for meta in _indices(sig, 1))
    adds = bool(argument(sig, 3, "accumulate", False))
    values = need(sig, 2, "values")
    target = sig.inputs[0]
    element_bytes = _addressed(sig) * target.itemsize
    read = indices + distinct_bytes(values)
    if sig.writes:
        return Moved(read + (element_bytes if adds else 0), element_bytes)
    return Moved(read + distinct_bytes(target), sum(distinct_bytes(meta) for meta in sig.outputs))
