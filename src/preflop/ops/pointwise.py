"""Element-wise work, reductions, softmax, losses, pooling: one FLOP per element and arithmetic operation.

Convention: + - * / compare, max, min, abs, negate, and each elementary function of the mathematical
library (exp, log, sqrt, pow, tanh, erf, sin...) are one operation. What is built of several of them
counts each (sigmoid = negate, exp, add, divide = 4). Selecting, copying, casting, filling, drawing
random numbers, indexing and bit logic are no arithmetic: `view.py` lists them as free.
None of this ever counts towards model FLOPs.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, log2

from preflop.ops.arguments import argument, need, product, result_elements
from preflop.ops.registry import FLOPS, FlopsFormula, Kind, Work, flops
from preflop.tape.events import Signature


def other(count: int) -> Work:
    """Element-wise work: never model FLOPs."""
    return Work(count, Kind.OTHER)


def per_result(count: int) -> FlopsFormula:
    """A formula: `count` FLOPs per element that the call computes."""
    return lambda sig: other(count * result_elements(sig))


def per_input(count: int) -> FlopsFormula:
    """A formula: `count` FLOPs per element of the first input (of all inputs of a foreach call)."""

    def formula(sig: Signature) -> Work:
        metas = sig.inputs if sig.op.startswith("aten._foreach") else sig.inputs[:1]
        return other(count * sum(meta.elements for meta in metas))

    return formula


def forms(name: str) -> tuple[str, ...]:
    """The names under which one arithmetic arrives: plain, in place, over lists of tensors.

    >>> forms("add")
    ('aten.add', 'aten.add_', 'aten._foreach_add', 'aten._foreach_add_')
    """
    return f"aten.{name}", f"aten.{name}_", f"aten._foreach_{name}", f"aten._foreach_{name}_"


# Arithmetic operations per element computed. Names stand for all their `forms`.
PER_RESULT: dict[int, str] = {
    1: """mul div true_divide divide multiply subtract floor_divide remainder fmod pow float_power square
        sqrt rsqrt reciprocal neg negative abs absolute sign sgn exp exp2 expm1 log log2 log10 log1p sin
        cos tan asin acos atan arcsin arccos arctan atan2 arctan2 sinh cosh tanh asinh acosh atanh erf erfc
        erfinv lgamma digamma polygamma special_erf special_erfinv special_digamma special_gammaln
        i0 special_i0 special_i0e special_i1 special_i1e sinc special_sinc igamma igammac
        floor ceil round trunc frac fix relu maximum minimum fmax fmin clamp_min clamp_max eq ne lt le gt ge
        equal isnan isinf isfinite isclose nan_to_num copysign deg2rad rad2deg signbit angle
        threshold not_equal less less_equal greater greater_equal ldexp heaviside nextafter
        special_log_ndtr special_ndtr special_ndtri special_erfcx special_bessel_j0 special_bessel_j1
        mvlgamma special_zeta frexp isposinf isneginf special_round special_exp2 special_expm1
        special_log1p special_erfc special_psi special_polygamma special_gammainc special_gammaincc arcsinh
        arccosh
        arctanh kron sum_to_size gcd lcm""",
    2: "clamp clip hypot xlogy special_xlogy special_xlog1py relu6 leaky_relu prelu "
    "hardtanh softshrink hardshrink rrelu polar dropout feature_dropout "
    "_prelu_kernel special_entr",
    3: "elu celu selu lerp hardsigmoid special_logit logit logaddexp logaddexp2 "
    "rrelu_with_noise linalg_cross cross",
    4: "sigmoid hardswish softplus special_expit log_sigmoid",
    5: "silu log_sigmoid_forward",
    # mish: softplus (4), tanh, multiply.
    6: "mish",
}

# Gradients of element-wise functions (and others without list forms), per element computed.
# Each count follows the formula in torch's derivatives.yaml, with saved results given.
GRADIENTS: dict[int, str] = {
    1: "threshold_backward hardtanh_backward hardshrink_backward softshrink_backward "
    "_prelu_kernel_backward leaky_relu_backward native_dropout_backward _masked_scale",
    2: "hardsigmoid_backward rrelu_with_noise_backward ",
    3: "tanh_backward sigmoid_backward elu_backward hardswish_backward logit_backward "
    "smooth_l1_loss_backward huber_loss_backward",
    # sigmoid (4), 1 - s, x * that, 1 + that, s * that, g * that.
    9: "silu_backward mish_backward",
    6: "softplus_backward log_sigmoid_backward",
}

# Reductions and scans: operations per element of the input.
PER_INPUT: dict[int, str] = {
    1: "sum nansum mean nanmean prod amax amin aminmax argmax argmin cumsum cumprod cummax cummin "
    "logcumsumexp "
    "_logcumsumexp "
    "native_norm count_nonzero median nanmedian mode _cummax_helper _cummin_helper trace bincount histc "
    "trapezoid diff topk kthvalue",
    2: "norm linalg_vector_norm linalg_norm _weight_norm_interface dist renorm frobenius_norm "
    "powsum cumprod_backward cummaxmin_backward",
    4: "var std var_mean std_mean logsumexp cov",
    # maximum, subtract, exp, sum, divide (logarithm: subtract).
    5: "_softmax softmax _safe_softmax _log_softmax log_softmax special_softmax special_log_softmax "
    "_masked_softmax _sparse_softmax",
}

# (g - sum(g * y)) * y, and g - exp(y) * sum(g).
SOFTMAX_GRADIENTS = "_softmax_backward_data _log_softmax_backward_data _masked_softmax_backward"


def _register_tables() -> None:
    for count, names in PER_RESULT.items():
        for name in names.split():
            flops(*forms(name))(per_result(count))
    for count, names in GRADIENTS.items():
        flops(*(f"aten.{name}" for name in names.split()))(per_result(count))
    for count, names in PER_INPUT.items():
        for name in names.split():
            flops(*forms(name))(per_input(count))
    flops(*(f"aten.{name}" for name in SOFTMAX_GRADIENTS.split()))(per_input(4))


def _is_one(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and value == 1)


@flops(*forms("add"), *forms("sub"), *forms("rsub"))
def add(sig: Signature) -> Work:
    """FLOPs of a + alpha·b: one per element, two where alpha is not 1."""
    alpha = argument(sig, 2, "alpha", 1)
    return other((1 if _is_one(alpha) else 2) * result_elements(sig))


@flops(*forms("addcmul"), *forms("addcdiv"))
def add_product(sig: Signature) -> Work:
    """FLOPs of self + value·a·b (or a / b): two per element, three where value is not 1."""
    value = argument(sig, 3, "value", argument(sig, 3, "scalars", 1))
    return other((2 if _is_one(value) else 3) * result_elements(sig))


@flops(*forms("gelu"))
def gelu(sig: Signature) -> Work:
    """FLOPs of x/2·(1 + erf(x/√2)) = 5 per element; the tanh form
    x/2·(1 + tanh(c·(x + a·x³))) = 9."""
    return other((9 if argument(sig, 1, "approximate", "none") == "tanh" else 5) * result_elements(sig))


@flops("aten.gelu_backward")
def gelu_backward(sig: Signature) -> Work:
    """FLOPs of the gradient of gelu. erf form: the distribution function (4), the density
    (square, scale, exp, scale: 4), g·(cdf + x·pdf): 3, so 11. tanh form: tanh of the inner (6),
    its derivative (4), sums and products (9), so 19."""
    return other((19 if argument(sig, 2, "approximate", "none") == "tanh" else 11) * result_elements(sig))


@flops("aten.glu")
def glu(sig: Signature) -> Work:
    """FLOPs of a · sigmoid(b): 5 per output element."""
    return other(5 * result_elements(sig))


@flops("aten.glu_backward")
def glu_backward(sig: Signature) -> Work:
    """FLOPs of the gradient of a · sigmoid(b), per pair: sigmoid 4, g·s 1, g·a·s·(1 - s) 4."""
    return other(9 * result_elements(sig) // 2)


@flops("aten.max", "aten.min")
def extreme(sig: Signature) -> Work:
    """FLOPs of max and min: one comparison per element of the input, or per output of two tensors."""
    binary = len(sig.inputs) > 1
    return other(result_elements(sig) if binary else need(sig, 0, "self").elements)


@flops("aten._foreach_max")
def foreach_extreme(sig: Signature) -> Work:
    """FLOPs of the largest element of each tensor: one comparison per element."""
    return other(sum(meta.elements for meta in sig.inputs))


@flops(
    "aten.sort",
    "aten.argsort",
    "aten.msort",
    "aten.unique_dim",
    "aten._unique2",
    "aten._unique",
    "aten.unique_consecutive",
)
def sort(sig: Signature) -> Work:
    """Comparisons of a merge sort, n·ceil(log2 n) per row along the sorted axis (last by default)."""
    x = need(sig, 0, "self")
    axis = argument(sig, 1, "dim", -1) if sig.op in ("aten.sort", "aten.argsort") else None
    whole = axis is None or isinstance(axis, bool) or not x.shape
    rows = x.elements if whole else x.shape[int(axis or 0)]
    return other(x.elements * ceil(log2(rows)) if rows > 1 else 0)


@flops("aten.searchsorted", "aten.bucketize")
def search(sig: Signature) -> Work:
    """Comparisons of a binary search: ceil(log2 boundaries) per result."""
    boundaries = sig.inputs[0 if sig.op == "aten.searchsorted" else -1]
    last = boundaries.shape[-1] if boundaries.shape else 1
    return other(result_elements(sig) * max(1, ceil(log2(max(last, 2)))))


@flops("aten.native_dropout", "aten._fused_dropout")
def dropout(sig: Signature) -> Work:
    """FLOPs of dropout: mask and scale, two per element (drawing the mask is not arithmetic)."""
    return other(2 * need(sig, 0, "input").elements)


_LOSSES: dict[str, int] = {
    "mse_loss": 2,
    "l1_loss": 2,
    "smooth_l1_loss": 4,
    "huber_loss": 4,
    # max(x, 0) - x·y + log(1 + exp(-|x|)).
    "binary_cross_entropy_with_logits": 8,
    # -(y·log p + (1 - y)·log(1 - p)).
    "binary_cross_entropy": 8,
    "soft_margin_loss": 4,
    "kl_div": 3,
}


def _loss(count: int) -> Callable[[Signature], Work]:
    def formula(sig: Signature) -> Work:
        elements = need(sig, 0, "self").elements
        reduced = sig.outputs and sig.outputs[0].elements != elements
        return other(elements * (count + bool(reduced)))

    return formula


@flops("aten.mse_loss_backward", "aten.l1_loss_backward", "aten.soft_margin_loss_backward")
def loss_backward(sig: Signature) -> Work:
    """FLOPs of 2/n·(x - y)·g: three per element."""
    return other(3 * result_elements(sig))


@flops("aten.binary_cross_entropy_backward")
def binary_cross_entropy_backward(sig: Signature) -> Work:
    """FLOPs of g·(p - y) / (p·(1 - p)): five per element."""
    return other(5 * result_elements(sig))


@flops("aten.nll_loss_forward", "aten.nll_loss2d_forward", "aten.nll_loss", "aten.nll_loss_nd")
def nll_loss(sig: Signature) -> Work:
    """FLOPs of picking and adding one log-probability per target: one per target."""
    return other(need(sig, 1, "target").elements)


@flops("aten.nll_loss_backward", "aten.nll_loss2d_backward")
def nll_loss_backward(sig: Signature) -> Work:
    """FLOPs of placing -g/n at each target: one per target."""
    return other(need(sig, 2, "target").elements)


@flops("aten.cross_entropy_loss")
def cross_entropy(sig: Signature) -> Work:
    """FLOPs of log-softmax (5 per score) and the negative log-likelihood, where it arrives undivided."""
    scores = need(sig, 0, "self")
    return other(5 * scores.elements + need(sig, 1, "target").elements)


@flops(
    "aten.avg_pool1d",
    "aten.avg_pool2d",
    "aten.avg_pool3d",
    "aten.max_pool2d_with_indices",
    "aten.max_pool3d_with_indices",
    "aten.max_pool2d",
    "aten.max_pool3d",
    "aten.max_pool1d",
    "aten.max_pool1d_with_indices",
    "aten.mkldnn_max_pool2d",
)
def pool(sig: Signature) -> Work:
    """FLOPs of pooling: one per output element and window position (sizes given once mean every axis)."""
    rank = int(next(c for c in sig.op if c.isdigit()))
    window = argument(sig, 1, "kernel_size", (1,))
    window = (window,) if isinstance(window, int) else tuple(window)
    window = window * rank if len(window) == 1 else window
    return other(sig.outputs[0].elements * product(window))


@flops("aten.avg_pool2d_backward", "aten.avg_pool3d_backward")
def average_pool_backward(sig: Signature) -> Work:
    """FLOPs of spreading each gradient over its window: one per gradient and window position."""
    rank = 2 if "2d" in sig.op else 3
    window = tuple(argument(sig, 2, "kernel_size", (1,)))
    window = window * rank if len(window) == 1 else window
    return other(need(sig, 0, "grad_output").elements * product(window))


flops(
    "aten.max_pool2d_with_indices_backward",
    "aten.max_pool3d_with_indices_backward",
    "aten.adaptive_max_pool2d_backward",
    "aten.adaptive_max_pool3d_backward",
)(per_input(1))
flops(
    "aten._adaptive_avg_pool2d",
    "aten._adaptive_avg_pool3d",
    "aten.adaptive_max_pool2d",
    "aten.adaptive_max_pool3d",
    "aten.adaptive_avg_pool1d",
    "aten.adaptive_avg_pool2d",
    "aten.adaptive_avg_pool3d",
)(per_input(1))
flops("aten._adaptive_avg_pool2d_backward", "aten._adaptive_avg_pool3d_backward")(per_result(1))

# Interpolation: taps multiplied and added per output element (2 · taps - 1), coordinates not counted.
flops("aten.upsample_linear1d")(per_result(3))
flops("aten.upsample_bilinear2d", "aten._upsample_bilinear2d_aa", "aten.grid_sampler_2d")(per_result(7))
flops("aten.upsample_trilinear3d", "aten.grid_sampler_3d")(per_result(15))
flops("aten.grid_sampler_2d_backward", "aten.grid_sampler_3d_backward")(
    lambda sig: other((2 ** (len(need(sig, 0, "grad").shape) - 2)) * 4 * need(sig, 0, "grad").elements)
)
flops("aten.upsample_bicubic2d", "aten._upsample_bicubic2d_aa")(per_result(31))
# Backward: each gradient is multiplied and added at every tap.
flops("aten.upsample_linear1d_backward")(per_input(4))
flops("aten.upsample_bilinear2d_backward", "aten._upsample_bilinear2d_aa_backward")(per_input(8))
flops("aten.upsample_trilinear3d_backward")(per_input(16))
flops("aten.upsample_bicubic2d_backward", "aten._upsample_bicubic2d_aa_backward")(per_input(32))
flops(
    "aten.upsample_nearest1d_backward",
    "aten.upsample_nearest2d_backward",
    "aten.upsample_nearest3d_backward",
    "aten._upsample_nearest_exact1d_backward",
    "aten._upsample_nearest_exact2d_backward",
    "aten._upsample_nearest_exact3d_backward",
)(per_input(1))

# Gates of one recurrent step (Paszke et al.; torch.nn.LSTM's equations): per hidden unit 4 gate sums of
# two terms and two biases, 3 sigmoids, 2 tanh, 4 products and sums.
LSTM_CELL_FLOPS = 4 * 3 + 3 * 4 + 2 + 4
GRU_CELL_FLOPS = 3 * 3 + 2 * 4 + 1 + 5


@flops("aten._thnn_fused_lstm_cell")
def lstm_cell(sig: Signature) -> Work:
    """FLOPs of the gates of one LSTM step: 30 per hidden unit (the matmuls come apart)."""
    return other(LSTM_CELL_FLOPS * need(sig, 2, "cx").elements)


@flops("aten._thnn_fused_lstm_cell_backward", "aten._thnn_fused_lstm_cell_backward_impl")
def lstm_cell_backward(sig: Signature) -> Work:
    """FLOPs of the gradients of the gates: three per gate function and product, 24 per hidden unit."""
    return other(24 * need(sig, 2, "cx").elements)


@flops("aten._thnn_fused_gru_cell")
def gru_cell(sig: Signature) -> Work:
    """FLOPs of the gates of one GRU step: 23 per hidden unit (the matmuls come apart)."""
    return other(GRU_CELL_FLOPS * need(sig, 2, "hx").elements)


@flops("aten._thnn_fused_gru_cell_backward")
def gru_cell_backward(sig: Signature) -> Work:
    """FLOPs of the gradients of the gates: 18 per hidden unit."""
    return other(18 * need(sig, 0, "grad_hy").elements)


@flops("aten._cdist_forward")
def pair_distance(sig: Signature) -> Work:
    """FLOPs of all pair distances: subtract, power, add per pair and coordinate, a root per pair."""
    pairs, width = result_elements(sig), need(sig, 0, "x1").shape[-1]
    return other(pairs * (3 * width + 1))


@flops("aten._cdist_backward")
def pair_distance_backward(sig: Signature) -> Work:
    """FLOPs of its gradient: subtract, scale, divide, add per pair and coordinate."""
    x1, pairs = need(sig, 1, "x1"), need(sig, 4, "cdist").elements
    return other(4 * pairs * x1.shape[-1])


@flops("aten._pdist_forward", "aten.pdist", "aten.cosine_similarity", "aten.pairwise_distance")
def row_distance(sig: Signature) -> Work:
    """FLOPs of distances between rows: subtract, power, add per pair and coordinate, a root per pair."""
    x = need(sig, 0, "self")
    width = x.shape[-1] if x.shape else 1
    return other(result_elements(sig) * (3 * width + 1))


@flops("aten._weight_norm_interface_backward")
def weight_norm_backward(sig: Signature) -> Work:
    """FLOPs of the gradient of g·v/|v|: a sum of products (2), then scale, scale, subtract, multiply."""
    return other(6 * need(sig, 1, "saved_v").elements)


@flops("aten._ctc_loss", "aten._ctc_loss_backward")
def ctc_loss(sig: Signature) -> Work:
    """FLOPs of connectionist temporal classification (estimate): per time step and state of the
    2·targets + 1 blanks-and-labels, three log-sum-exp terms (8) and one sum.

    Source: Graves et al. 2006, equations 6-8, in log space; target length as padded.
    """
    first = 0 if sig.op == "aten._ctc_loss" else 1
    scores, targets = need(sig, first, "log_probs"), need(sig, first + 1, "targets")
    batch = scores.shape[1] if len(scores.shape) == 3 else 1
    states = 2 * (targets.elements // max(1, batch)) + 1
    return other(9 * scores.shape[0] * batch * states)


@flops("aten._amp_foreach_non_finite_check_and_unscale_")
def unscale(sig: Signature) -> Work:
    """FLOPs of GradScaler's unscale: a test and a product per gradient element."""
    gradients = argument(sig, 0, "self", ())
    return other(2 * sum(sig.inputs[ref.index].elements for ref in gradients))


flops("aten._amp_update_scale_")(lambda sig: other(2))
_register_tables()
for _name, _count in _LOSSES.items():
    if f"aten.{_name}" not in FLOPS:
        flops(f"aten.{_name}")(_loss(_count))
