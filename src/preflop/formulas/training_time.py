"""How long a training run takes, from 6ND."""

from __future__ import annotations

from preflop.formulas.work import six_nd
from preflop.quantity import require_positive

# Seconds of a day.
DAY_S = 86_400


def training_days(
    parameters: int, tokens: int, gpus: int, peak_flops_per_s: float, model_flops_utilization: float
) -> float:
    """Days of training: 6·N·D / (GPUs · peak FLOP/s · MFU · 86400).

    Args:
        peak_flops_per_s: dense peak of one GPU in the format the matmuls run in; a specification
            sheet's figure with sparsity is twice that.
        model_flops_utilization: MFU, from 0 to 1.

    >>> round(training_days(70_000_000_000, 15_000_000_000_000, 1024, 989.5e12, 0.5), 1)
    143.9

    Does not count restarts, evaluation or attention. Source: 6ND of Kaplan et al. 2020 (arXiv
    2001.08361) over the MFU of Chowdhery et al. 2022 (arXiv 2204.02311), appendix B.

    Raises:
        BadNumber: any of them is zero, negative, NaN or infinite.
    """
    require_positive(
        parameters=parameters,
        tokens=tokens,
        gpus=gpus,
        peak_flops_per_s=peak_flops_per_s,
        model_flops_utilization=model_flops_utilization,
    )
    return six_nd(parameters, tokens) / (gpus * peak_flops_per_s * model_flops_utilization * DAY_S)


def narayanan_training_days(
    parameters: int, tokens: int, gpus: int, achieved_hardware_flops_per_s: float
) -> float:
    """Days of training with full recomputation: 8·T·P / (n·X), X being the achieved FLOP/s of a GPU.

    >>> round(narayanan_training_days(175_000_000_000, 300_000_000_000, 1024, 140e12))       # GPT-3
    34

    Source: Narayanan et al. 2021 (arXiv 2104.04473), section 5.1, equation 4.

    Raises:
        BadNumber: any of them is zero, negative, NaN or infinite.
    """
    require_positive(
        parameters=parameters,
        tokens=tokens,
        gpus=gpus,
        achieved_hardware_flops_per_s=achieved_hardware_flops_per_s,
    )
    return 8 * parameters * tokens / (gpus * achieved_hardware_flops_per_s * DAY_S)
