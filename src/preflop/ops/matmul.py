"""Matrix multiplication: 2 FLOPs per multiply-add of (m, k) @ (k, n), whatever form the call takes.

Bias and beta/alpha terms are not counted: the field counts the product only ("Counting Dots",
scaling-book). Exact would be m*n*(2k - 1).
"""

from __future__ import annotations

from preflop.ops.arguments import (
    argument,
    is_sparse,
    multiply_add_flops,
    need,
    product,
    stored_elements,
    tensors,
)
from preflop.ops.registry import Kind, Work, flops
from preflop.tape.events import Signature, TensorMeta


def product_work(a: TensorMeta, b: TensorMeta) -> Work:
    """Work of `a @ b` by the rules of torch.matmul: multiply-adds = broadcast batch x m x k x n.

    Source: scaling-book, "Counting Dots": 2mkn for (m, k) @ (k, n).
    """
    k = a.shape[-1]
    m = a.shape[-2] if len(a.shape) > 1 else 1
    n = b.shape[-1] if len(b.shape) > 1 else 1
    batch = product(broadcast(a.shape[:-2], b.shape[:-2]))
    return Work(multiply_add_flops(a) * batch * m * k * n, Kind.MATMUL)


def broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that two shapes broadcast to.

    >>> broadcast((2, 1), (3,))
    (2, 3)
    """
    rank = max(len(a), len(b))
    left = (1,) * (rank - len(a)) + a
    right = (1,) * (rank - len(b)) + b
    return tuple(y if x == 1 else x for x, y in zip(left, right, strict=True))


@flops(
    "aten.mm",
    "aten.bmm",
    "aten.matmul",
    "aten.mv",
    "aten.dot",
    "aten.vdot",
    "aten.inner",
    "aten._int_mm",
    "aten._scaled_mm",
    "aten._scaled_mm_v2",
    "aten.linalg_matmul",
)
def multiply(sig: Signature) -> Work:
    """FLOPs of op(a, b): 2·batch·m·k·n, 8 for complex numbers."""
    return _maybe_sparse(need(sig, 0, "self"), need(sig, 1, "mat2"))


@flops(
    "aten.addmm",
    "aten.baddbmm",
    "aten.addmv",
    "aten.addbmm",
    "aten._addmm_activation",
    "aten.addmm_",
    "aten.baddbmm_",
    "aten.addmv_",
    "aten.addbmm_",
    "aten._sparse_addmm",
)
def add_multiply(sig: Signature) -> Work:
    """FLOPs of op(bias, a, b): 2·batch·m·k·n, the bias is not counted."""
    return _maybe_sparse(need(sig, 1, "mat1"), need(sig, 2, "mat2"))


@flops("aten._foreach_mm")
def foreach_multiply(sig: Signature) -> Work:
    """FLOPs of a list of products, 2mkn each."""
    pairs = zip(tensors(sig, 0, "self"), tensors(sig, 1, "mat2"), strict=True)
    return Work(sum(product_work(a, b).flops for a, b in pairs), Kind.MATMUL)


@flops("aten.matmul_backward")
def multiply_backward(sig: Signature) -> Work:
    """FLOPs of the gradients of a @ b that the mask asks for: each costs what the product did."""
    a, b = need(sig, 1, "self"), need(sig, 2, "other")
    mask = argument(sig, 3, "mask", (True, True))
    return Work(product_work(a, b).flops * (bool(mask[0]) + bool(mask[1])), Kind.MATMUL)


@flops("aten._sparse_mm")
def sparse_multiply(sig: Signature) -> Work:
    """FLOPs of a sparse (m, k) @ dense (k, n): 2 · stored elements · n."""
    return _maybe_sparse(need(sig, 0, "sparse"), need(sig, 1, "dense"))


def _maybe_sparse(a: TensorMeta, b: TensorMeta) -> Work:
    """Work of `a @ b`, where either may be sparse: each stored element meets one row of the other.

    Where the tape does not say how many elements are stored, the dense product is an upper bound and
    marked as an estimate.
    """
    dense = product_work(a, b)
    if not (is_sparse(a) or is_sparse(b)):
        return dense
    sparse, width = (a, b.shape[-1] if len(b.shape) > 1 else 1) if is_sparse(a) else (b, a.shape[-2])
    stored = stored_elements(sparse)
    if stored is None:
        return Work(dense.flops, Kind.MATMUL, estimate=True)
    return Work(multiply_add_flops(a) * stored * width, Kind.MATMUL)


@flops("aten.einsum", "aten.tensordot")
def composite(sig: Signature) -> Work:
    """FLOPs of a two-operand einsum or tensordot that arrives undivided (inference mode)."""
    if sig.op == "aten.tensordot":
        a, b = need(sig, 0, "self"), need(sig, 1, "other")
        summed = product(tuple(a.shape[dim] for dim in argument(sig, 2, "dims_self", ())))
        return Work(multiply_add_flops(a) * a.elements * b.elements // max(1, summed), Kind.MATMUL)
    equation = str(argument(sig, 0, "equation", ""))
    operands = tensors(sig, 1, "tensors")
    return Work(einsum_flops(equation, tuple(meta.shape for meta in operands)), Kind.MATMUL)


def einsum_flops(equation: str, shapes: tuple[tuple[int, ...], ...]) -> int:
    """FLOPs of an einsum contracted left to right, 2 · (all sizes named by the two operands) each.

    >>> einsum_flops("bik,bkj->bij", ((2, 3, 4), (2, 4, 5)))       # 2 * 2*3*4*5
    240
    """
    inputs, _, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        letters = _without_ellipsis(term, len(shape))
        sizes.update({letter: max(sizes.get(letter, 1), n) for letter, n in zip(letters, shape, strict=True)})
    total, left = 0, _without_ellipsis(terms[0], len(shapes[0]))
    for position in range(1, len(terms)):
        right = _without_ellipsis(terms[position], len(shapes[position]))
        both = set(left) | set(right)
        total += 2 * product(tuple(sizes[letter] for letter in both))
        later = set(output) | {c for term in terms[position + 1 :] for c in term}
        left = tuple(c for c in sorted(both) if c in later or c.isdigit())
    return total


def _without_ellipsis(term: str, rank: int) -> tuple[str, ...]:
    """One letter per axis; the axes under an ellipsis are named "0", "1"... from the right."""
    before, dots, after = term.partition("...")
    if not dots:
        return tuple(term)
    hidden = rank - len(before) - len(after)
    return (*before, *(str(hidden - 1 - i) for i in range(hidden)), *after)


@flops("aten.addr", "aten.addr_", "aten.ger", "aten.outer")
def outer(sig: Signature) -> Work:
    """FLOPs of an outer product, 2·m·n: a matmul with k = 1."""
    first = 1 if sig.op.startswith("aten.addr") else 0
    a, b = need(sig, first, "vec1"), need(sig, first + 1, "vec2")
    return Work(multiply_add_flops(a) * a.elements * b.elements, Kind.MATMUL)


@flops(
    "aten.linear",
    "aten.mkldnn_linear",
    "mkldnn._linear_pointwise",
    "aten._weight_int8pack_mm",
    "aten.fbgemm_linear_fp16_weight",
)
def linear(sig: Signature) -> Work:
    """FLOPs of x (..., k) with a weight (n, k): 2·rows·k·n."""
    x = need(sig, 0, "input")
    n = sig.outputs[0].shape[-1] if len(sig.outputs[0].shape) else 1
    return Work(multiply_add_flops(x) * x.elements * n, Kind.MATMUL)


@flops("aten._weight_int4pack_mm", "aten._weight_int4pack_mm_for_cpu")
def packed_linear(sig: Signature) -> Work:
    """FLOPs of x (m, k) with a packed 4-bit weight of n rows: 2·m·k·n (n from the output)."""
    return linear(sig)


@flops("aten.linear_backward", "aten.mkldnn_linear_backward")
def linear_backward(sig: Signature) -> Work:
    """FLOPs of the gradients of `linear` that output_mask asks for: one matmul of 2·rows·k·n each for
    the input and the weight (the bias is a sum and not counted)."""
    x, weight = need(sig, 0, "self"), need(sig, 2, "weight")
    mask = argument(sig, 3, "output_mask", (True, True, True))
    one = multiply_add_flops(x) * x.elements * weight.shape[0]
    return Work(one * (bool(mask[0]) + bool(mask[1])), Kind.MATMUL)


@flops("aten._grouped_mm", "aten._scaled_grouped_mm", "aten._scaled_grouped_mm_v2")
def grouped(sig: Signature) -> Work:
    """FLOPs of a grouped matmul. Each row meets one group's matrix, so groups do not multiply the
    work: 2·m·k·n, and 2·g·m·k·n only where both operands have a group axis.

    Exact when the groups cover all rows, as offsets of a routed batch do.
    """
    a, b = need(sig, 0, "self"), need(sig, 1, "mat2")
    groups = a.shape[0] if len(a.shape) == 3 and len(b.shape) == 3 else 1
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    return Work(multiply_add_flops(a) * groups * m * k * n, Kind.MATMUL)


@flops("aten._trilinear")
def trilinear(sig: Signature) -> Work:
    """FLOPs of sum(i1 · i2 · i3), as torch contracts it: first i1 with i2, then with i3.

    For nn.Bilinear (B, I) x (O, I, J) x (B, J): 2·B·O·I·J + 2·B·O·J.
    Source: ATen/native/Linear.cpp, `_trilinear` (two sumproduct_pair).
    """
    names = ("i1", "i2", "i3")
    metas = [need(sig, i, name) for i, name in enumerate(names)]
    shapes = [_expand(m.shape, argument(sig, 3 + i, f"expand{i + 1}", ())) for i, m in enumerate(metas)]
    rank = len(shapes[0])
    summed = {dim % rank for dim in argument(sig, 6, "sumdim", ())}
    pair = broadcast(shapes[0], shapes[1])
    kept = tuple(1 if d in summed and shapes[2][d] == 1 else pair[d] for d in range(rank))
    each = multiply_add_flops(metas[0])
    return Work(each * (product(pair) + product(broadcast(kept, shapes[2]))), Kind.MATMUL)


def _expand(shape: tuple[int, ...], dims: tuple[int, ...]) -> tuple[int, ...]:
    """`shape` with a size-1 axis put in at each of `dims` (positions in the result)."""
    sizes = list(shape)
    for dim in sorted(dims):
        sizes.insert(dim, 1)
    return tuple(sizes)


@flops("aten.bilinear")
def bilinear(sig: Signature) -> Work:
    """FLOPs of x1 (..., i), x2 (..., j) with a weight (o, i, j): 2·rows·o·i·j + 2·rows·o·j."""
    x1, weight = need(sig, 0, "input1"), need(sig, 2, "weight")
    rows = x1.elements // max(1, x1.shape[-1])
    o, _, j = weight.shape
    return Work(multiply_add_flops(x1) * rows * (weight.elements + o * j), Kind.MATMUL)


@flops("aten.linalg_multi_dot", "aten.chain_matmul")
def multi_dot(sig: Signature) -> Work:
    """FLOPs of a product of matrices in the cheapest order, as torch chooses it (dynamic programme
    over the split points; Cormen et al., "Matrix-chain multiplication")."""
    matrices = tensors(sig, 0, "tensors")
    first, last = matrices[0], matrices[-1]
    rows = 1 if len(first.shape) == 1 else first.shape[0]
    columns = 1 if len(last.shape) == 1 else last.shape[-1]
    sizes = [rows, *(m.shape[0] for m in matrices[1:]), columns]
    return Work(multiply_add_flops(first) * _cheapest_chain(sizes), Kind.MATMUL)


def _cheapest_chain(sizes: list[int]) -> int:
    """Fewest multiply-adds for a chain of matrices (sizes[i], sizes[i + 1]).

    >>> _cheapest_chain([10, 100, 5, 50])
    7500
    """
    count = len(sizes) - 1
    best = [[0] * count for _ in range(count)]
    for length in range(1, count):
        for i in range(count - length):
            j = i + length
            best[i][j] = min(
                best[i][k] + best[k + 1][j] + sizes[i] * sizes[k + 1] * sizes[j + 1] for k in range(i, j)
            )
    return best[0][count - 1] if count else 0


@flops("aten._euclidean_dist")
def euclidean_distance(sig: Signature) -> Work:
    """FLOPs of all pair distances by one matmul over k + 2 columns, 2·batch·m·(k + 2)·n.

    Source: ATen/native/Distance.cpp, `_euclidean_dist` (inputs are padded with norms and ones).
    """
    a, b = need(sig, 0, "x1"), need(sig, 1, "x2")
    batch = product(broadcast(a.shape[:-2], b.shape[:-2]))
    return Work(2 * batch * a.shape[-2] * (a.shape[-1] + 2) * b.shape[-2], Kind.MATMUL)
