"""The optimizers Preflop knows by name: which class each is and how many states it keeps.

Adding one is one `OptimizerSpec` below; the test that judges it trains it and compares its states with
the declared ones. No torch: `torch_class` is a dotted name that the recorder imports. What torch does not
have is written out in `models/optimizers.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from preflop.errors import UnknownOptimizer, unknown_name


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """One optimizer: what builds it and what it keeps per parameter.

    Counts state tensors of the parameter's own shape. Does not count the step counter (one fp32
    number per parameter *tensor*) nor, for `factored`, the row and column vectors.
    """

    name: str
    torch_class: str
    """Dotted name of the class, "torch.optim.AdamW"."""
    states: tuple[str, ...]
    """Keys of the states that have the parameter's shape, as torch names them."""
    kwargs: Mapping[str, object]
    """Keyword arguments that make it this optimizer. Everything else is torch's default."""
    factored: bool = False
    """Keeps a row and a column vector per matrix besides (Adafactor): smaller than any state."""
    matrices_only: bool = False
    """Updates the matrices of a model's blocks; embeddings, head, norms and biases go by AdamW."""
    quantised: bool = False
    """States are one byte per element whatever the precision, with an fp32 absmax per block of 256; those of
    tensors below 4096 elements are fp32."""
    in_backward: bool = False
    """Each parameter is updated in backward, as soon as its gradient is there, which is then freed."""

    @property
    def states_per_parameter(self) -> int:
        """State elements per parameter element: AdamW 2, SGD 0.

        >>> find_optimizer("adamw").states_per_parameter, find_optimizer("sgd").states_per_parameter
        (2, 0)
        """
        return len(self.states)


def _spec(
    name: str,
    cls: str,
    states: str = "",
    *,
    factored: bool = False,
    matrices_only: bool = False,
    quantised: bool = False,
    **kwargs: object,
) -> OptimizerSpec:
    path = cls if "." in cls else f"torch.optim.{cls}"
    return OptimizerSpec(
        name, path, tuple(states.split()), MappingProxyType(kwargs), factored, matrices_only, quantised
    )


_ADAM = "exp_avg exp_avg_sq"
_OURS = "preflop.models.optimizers"
IN_BACKWARD = "-in-backward"

# States as torch 2.13 makes them in `Optimizer.state` (torch/optim/*.py, `_init_group`).
# "-loop", "-foreach" and "-fused" are the three ways torch runs one update: they differ in temporaries
# and in bytes moved, not in states. Without a suffix torch chooses (foreach on CUDA, loop on CPU).
OPTIMIZERS: dict[str, OptimizerSpec] = {
    spec.name: spec
    for spec in (
        _spec("sgd", "SGD"),
        _spec("sgd-loop", "SGD", foreach=False),
        _spec("sgd-foreach", "SGD", foreach=True),
        _spec("momentum", "SGD", "momentum_buffer", momentum=0.9),
        _spec("momentum-loop", "SGD", "momentum_buffer", momentum=0.9, foreach=False),
        _spec("momentum-foreach", "SGD", "momentum_buffer", momentum=0.9, foreach=True),
        _spec("nesterov", "SGD", "momentum_buffer", momentum=0.9, nesterov=True),
        _spec("adam", "Adam", _ADAM),
        _spec("adam-loop", "Adam", _ADAM, foreach=False),
        _spec("adam-foreach", "Adam", _ADAM, foreach=True),
        _spec("adam-fused", "Adam", _ADAM, fused=True),
        _spec("adamw", "AdamW", _ADAM),
        _spec("adamw-loop", "AdamW", _ADAM, foreach=False),
        _spec("adamw-foreach", "AdamW", _ADAM, foreach=True),
        _spec("adamw-fused", "AdamW", _ADAM, fused=True),
        _spec("adamw-amsgrad", "AdamW", f"{_ADAM} max_exp_avg_sq", amsgrad=True),
        _spec("nadam", "NAdam", _ADAM),
        _spec("radam", "RAdam", _ADAM),
        _spec("adamax", "Adamax", "exp_avg exp_inf"),
        _spec("adagrad", "Adagrad", "sum"),
        _spec("adadelta", "Adadelta", "square_avg acc_delta"),
        _spec("rmsprop", "RMSprop", "square_avg"),
        _spec("rmsprop-momentum", "RMSprop", "square_avg momentum_buffer", momentum=0.9),
        _spec("rprop", "Rprop", "prev step_size"),
        _spec("asgd", "ASGD", "ax"),
        _spec("adafactor", "Adafactor", factored=True),
        _spec("muon", "Muon", "momentum_buffer", matrices_only=True),
        _spec("lion", f"{_OURS}.Lion", "exp_avg"),
        _spec("adamw-8bit", f"{_OURS}.AdamW8bit", "state1 state2", quantised=True),
    )
}


def find_optimizer(name: str) -> OptimizerSpec:
    """The optimizer of that name, in any case; "sgd-momentum" is "momentum", "_" may stand for "-".

    Any of them with "-in-backward" behind updates each parameter in backward.

    >>> find_optimizer("AdamW").torch_class
    'torch.optim.AdamW'
    >>> find_optimizer("adamv")
    Traceback (most recent call last):
    preflop.errors.UnknownOptimizer: no optimizer named 'adamv'.
      Nearest: adam, radam, nadam. All: adadelta, adafactor, ...

    Raises:
        UnknownOptimizer: there is none; the message names the nearest.
    """
    folded = name.strip().casefold().replace("_", "-")
    if folded.endswith(IN_BACKWARD):
        plain = find_optimizer(folded.removesuffix(IN_BACKWARD))
        return dataclasses.replace(plain, name=f"{plain.name}{IN_BACKWARD}", in_backward=True)
    found = OPTIMIZERS.get({"sgd-momentum": "momentum"}.get(folded, folded))
    if found is None:
        raise unknown_name(UnknownOptimizer, "optimizer", name, OPTIMIZERS, ", ".join(sorted(OPTIMIZERS)))
    return found
