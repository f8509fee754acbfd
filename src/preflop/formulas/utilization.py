"""Which share of a device's peak a run uses."""

from __future__ import annotations

from preflop.quantity import require_positive


def model_flops_utilization(
    model_flops_per_token: float, tokens_per_s: float, peak_flops_per_s: float
) -> float:
    """MFU: FLOPs that the model needs, per second, over the dense peak. Recomputation does not count.

    Args:
        model_flops_per_token: forward and backward, without recomputation.
        tokens_per_s: of as many devices as `peak_flops_per_s` is of.

    >>> round(model_flops_utilization(3.2777e12, 238.3e3, 6144 * 275e12), 3)        # PaLM 540B
    0.462

    Source: Chowdhery et al. 2022 (arXiv 2204.02311), appendix B.

    Raises:
        BadNumber: any of them is zero, negative, NaN or infinite.
    """
    require_positive(
        model_flops_per_token=model_flops_per_token,
        tokens_per_s=tokens_per_s,
        peak_flops_per_s=peak_flops_per_s,
    )
    return model_flops_per_token * tokens_per_s / peak_flops_per_s


def hardware_flops_utilization(
    model_flops_per_token: float,
    recomputed_flops_per_token: float,
    tokens_per_s: float,
    peak_flops_per_s: float,
) -> float:
    """HFU: FLOPs that the hardware does, recomputed ones included, per second, over the dense peak.

    >>> hardware_flops_utilization(6e9, 2e9, 50_000, 1e15)        # full recomputation: 4/3 of MFU
    0.4

    Source: Chowdhery et al. 2022 (arXiv 2204.02311), section 4.1; Korthikanti et al. 2022, section 6.

    Raises:
        BadNumber: a negative recomputed count, or any other that is not positive and finite.
    """
    if recomputed_flops_per_token != 0:
        require_positive(recomputed_flops_per_token=recomputed_flops_per_token)
    return model_flops_utilization(
        model_flops_per_token + recomputed_flops_per_token, tokens_per_s, peak_flops_per_s
    )
