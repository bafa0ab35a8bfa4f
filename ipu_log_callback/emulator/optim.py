"""PopTorch's optimizers: PyTorch's own with the device's arguments (PopTorch 3.4 `optim.py`).

Each class is a subclass of PyTorch's and its `step` does what PopART does on the device. Arguments
that only choose number formats or guard float16 gradients (`loss_scaling`, `velocity_scaling`,
`use_combined_accum`, the `…accum_type`) are stored and change nothing here, for the emulator keeps
PyTorch's own precision.
"""

from typing import Any, Callable, Dict, Iterable, Optional, Tuple

import torch

from ipu_log_callback.emulator.console import logger
from ipu_log_callback.emulator.errors import NotEmulatedError
from ipu_log_callback.emulator.optimizer_base import Optimizer, VariableAttributes

__all__ = ["LAMB", "SGD", "Adam", "AdamW", "Optimizer", "RMSprop", "VariableAttributes", "check"]

_FLOAT16_MAX = 65500.0


class SGD(Optimizer, torch.optim.SGD):
    """Stochastic gradient descent with optional momentum."""

    _own_defaults = {
        "loss_scaling": 1.0,
        "velocity_scaling": 1.0,
        "use_combined_accum": False,
        "accum_type": torch.float32,
        "velocity_accum_type": torch.float32,
        "max_grad_norm": float("inf"),
    }

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: Optional[float] = None,
        dampening: Optional[float] = None,
        weight_decay: Optional[float] = None,
        nesterov: Optional[bool] = None,
        maximize: Optional[bool] = None,
        foreach: Optional[bool] = None,
        differentiable: Optional[bool] = None,
        loss_scaling: Optional[float] = None,
        velocity_scaling: Optional[float] = None,
        use_combined_accum: Optional[bool] = None,
        accum_type: Optional[torch.dtype] = None,
        velocity_accum_type: Optional[torch.dtype] = None,
        max_grad_norm: Optional[float] = None,
    ) -> None:
        """Take PyTorch's arguments, then the device's; ``None`` means the default.

        Args:
            params: Parameters or groups.
            lr: Learning rate.
            momentum: As in PyTorch.
            dampening: As in PyTorch.
            weight_decay: As in PyTorch.
            nesterov: As in PyTorch.
            maximize: Must not be set.
            foreach: As in PyTorch.
            differentiable: As in PyTorch.
            loss_scaling: Stored.
            velocity_scaling: Stored; a warning if `use_combined_accum` is not set.
            use_combined_accum: Stored.
            accum_type: `torch.float32` (default) or `torch.float16`; stored.
            velocity_accum_type: Likewise.
            max_grad_norm: Norm to which all gradients together are clipped.

        Raises:
            NotEmulatedError: If `maximize`.
        """
        self._prepare(torch.optim.SGD.__init__, params, locals())
        if use_combined_accum:
            scaling = 1.0 if velocity_scaling is None else velocity_scaling
            self.defaults["velocity_scaling"] = scaling
            for group in self.param_groups:
                group.setdefault("velocity_scaling", scaling)
        elif velocity_scaling is not None:
            logger.warning(
                "velocity_scaling value ignored when using the separate variant "
                "(use_combined_accum=False)."
            )

    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Clip, then do PyTorch's step."""
        self._clip()
        return torch.optim.SGD.step(self, closure)


class Adam(Optimizer, torch.optim.Adam):
    """Adam, as PyTorch's; without AMSGrad."""

    _own_defaults = {
        "loss_scaling": 1.0,
        "accum_type": torch.float32,
        "first_order_momentum_accum_type": torch.float32,
        "second_order_momentum_accum_type": torch.float32,
        "max_grad_norm": float("inf"),
    }

    def __init__(
        self,
        params: Iterable[Any],
        lr: Optional[float] = None,
        betas: Optional[Tuple[float, float]] = None,
        eps: Optional[float] = None,
        weight_decay: Optional[float] = None,
        amsgrad: Optional[bool] = None,
        foreach: Optional[bool] = None,
        maximize: Optional[bool] = None,
        capturable: Optional[bool] = None,
        differentiable: Optional[bool] = None,
        fused: Optional[bool] = None,
        loss_scaling: Optional[float] = None,
        accum_type: Optional[torch.dtype] = None,
        first_order_momentum_accum_type: Optional[torch.dtype] = None,
        second_order_momentum_accum_type: Optional[torch.dtype] = None,
        max_grad_norm: Optional[float] = None,
    ) -> None:
        """Take PyTorch's arguments, then the device's; only `max_grad_norm` has an effect.

        Raises:
            NotEmulatedError: If `maximize`.
        """
        self._prepare(torch.optim.Adam.__init__, params, locals())

    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Clip, then do PyTorch's step."""
        self._clip()
        return torch.optim.Adam.step(self, closure)


class AdamW(Optimizer, torch.optim.AdamW):
    """Adam with decoupled weight decay, as PyTorch's; without AMSGrad."""

    _own_defaults = {**Adam._own_defaults, "bias_correction": True}

    def __init__(
        self,
        params: Iterable[Any],
        lr: Optional[float] = None,
        betas: Optional[Tuple[float, float]] = None,
        eps: Optional[float] = None,
        weight_decay: Optional[float] = None,
        amsgrad: Optional[bool] = None,
        maximize: Optional[bool] = None,
        foreach: Optional[bool] = None,
        capturable: Optional[bool] = None,
        differentiable: Optional[bool] = None,
        fused: Optional[bool] = None,
        loss_scaling: Optional[float] = None,
        bias_correction: Optional[bool] = None,
        accum_type: Optional[torch.dtype] = None,
        first_order_momentum_accum_type: Optional[torch.dtype] = None,
        second_order_momentum_accum_type: Optional[torch.dtype] = None,
        max_grad_norm: Optional[float] = None,
    ) -> None:
        """Take PyTorch's arguments, then the device's.

        Of these, `bias_correction` and `max_grad_norm` have an effect.

        Raises:
            NotEmulatedError: If `maximize`.
        """
        self._prepare(torch.optim.AdamW.__init__, params, locals())

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Clip, then do PyTorch's step, or the same without bias correction."""
        self._clip()
        if self.bias_correction:  # type: ignore[attr-defined]  # set from `_own_defaults`
            return torch.optim.AdamW.step(self, closure)
        loss = _evaluate(closure)
        for group, param in _with_gradients(self):
            mean, square, _ = _update_moments(self.state[param], param, group["betas"])
            param.mul_(1 - group["lr"] * group["weight_decay"])
            param.addcdiv_(mean, square.sqrt().add_(group["eps"]), value=-group["lr"])
        return loss


class RMSprop(Optimizer, torch.optim.RMSprop):
    """RMSprop, as PyTorch's or, with `use_tf_variant`, as TensorFlow's."""

    _own_defaults = {
        "loss_scaling": 1.0,
        "accum_type": torch.float32,
        "first_order_momentum_accum_type": torch.float32,
        "second_order_momentum_accum_type": torch.float32,
        "use_tf_variant": False,
    }

    def __init__(
        self,
        params: Iterable[Any],
        lr: Optional[float] = None,
        alpha: Optional[float] = None,
        eps: Optional[float] = None,
        weight_decay: Optional[float] = None,
        momentum: Optional[float] = None,
        centered: Optional[bool] = None,
        foreach: Optional[bool] = None,
        maximize: Optional[bool] = None,
        differentiable: Optional[bool] = None,
        loss_scaling: Optional[float] = None,
        accum_type: Optional[torch.dtype] = None,
        first_order_momentum_accum_type: Optional[torch.dtype] = None,
        second_order_momentum_accum_type: Optional[torch.dtype] = None,
        use_tf_variant: Optional[bool] = None,
    ) -> None:
        """Take PyTorch's arguments, then the device's.

        `use_tf_variant` starts the average of squares at one, puts `eps` under the root and
        multiplies the learning rate into the momentum buffer.

        Raises:
            NotEmulatedError: If `maximize`.
        """
        self._prepare(torch.optim.RMSprop.__init__, params, locals())

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Do PyTorch's step, or TensorFlow's."""
        if not self.use_tf_variant:  # type: ignore[attr-defined]  # set from `_own_defaults`
            return torch.optim.RMSprop.step(self, closure)
        loss = _evaluate(closure)
        for group, param in _with_gradients(self):
            self._tensorflow_step(group, param, self.state[param])
        return loss

    @staticmethod
    def _tensorflow_step(group: Dict[str, Any], param: torch.Tensor, state: Dict[str, Any]) -> None:
        assert param.grad is not None
        grad = param.grad.add(param, alpha=group["weight_decay"])
        if not state:
            state["square_avg"] = torch.ones_like(param)
            state["grad_avg"] = torch.zeros_like(param)
            state["momentum_buffer"] = torch.zeros_like(param)
        square, alpha = state["square_avg"], group["alpha"]
        square.mul_(alpha).addcmul_(grad, grad, value=1 - alpha)
        variance = square
        if group["centered"]:
            state["grad_avg"].lerp_(grad, 1 - alpha)
            variance = square - state["grad_avg"] ** 2
        velocity = state["momentum_buffer"]
        velocity.mul_(group["momentum"])
        velocity.addcdiv_(grad, (variance + group["eps"]).sqrt_(), value=group["lr"])
        param.sub_(velocity)


class LAMB(Optimizer, torch.optim.Optimizer):
    """Layer-wise adaptive moments for large batches.

    After You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes". A
    layer's weight norm is limited to `max_weight_norm` before it scales the update.
    """

    _own_defaults = {
        "bias_correction": True,
        "loss_scaling": 1.0,
        "accum_type": torch.float32,
        "first_order_momentum_accum_type": torch.float32,
        "second_order_momentum_accum_type": torch.float32,
    }

    def __init__(
        self,
        params: Iterable[Any],
        lr: Optional[float] = None,
        betas: Optional[Tuple[float, float]] = None,
        eps: Optional[float] = None,
        weight_decay: Optional[float] = None,
        bias_correction: Optional[bool] = None,
        loss_scaling: Optional[float] = None,
        max_weight_norm: Optional[float] = None,
        accum_type: Optional[torch.dtype] = None,
        first_order_momentum_accum_type: Optional[torch.dtype] = None,
        second_order_momentum_accum_type: Optional[torch.dtype] = None,
    ) -> None:
        """Take the method's arguments, then the device's; ``None`` means the default."""
        self._prepare(_init_lamb, params, locals())

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Update every parameter by its own trust ratio."""
        loss = _evaluate(closure)
        for group, param in _with_gradients(self):
            beta1, beta2 = group["betas"]
            mean, square, count = _update_moments(self.state[param], param, (beta1, beta2))
            if self.bias_correction:  # type: ignore[attr-defined]  # set from `_own_defaults`
                mean = mean / (1 - beta1**count)
                square = square / (1 - beta2**count)
            update = mean / (square.sqrt() + group["eps"]) + group["weight_decay"] * param
            weight_norm = float(param.norm().clamp(max=group["max_weight_norm"]))
            update_norm = float(update.norm())
            trust = weight_norm / update_norm if weight_norm and update_norm else 1.0
            param.sub_(update, alpha=group["lr"] * trust)
        return loss


def check(optimizer: torch.optim.Optimizer) -> None:
    """Check that the device can run `optimizer` (PopTorch 3.4 `_optimizer_attributes.py`).

    Raises:
        AssertionError: If its type is not supported, or `centered` or `betas` are not as PopART
            needs them.
        ValueError: If it uses AMSGrad.
        NotEmulatedError: If it maximises.
    """
    kinds = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, LAMB)
    assert isinstance(optimizer, kinds), (
        "Unsupported optimizer type. Types supported SGD, Adam, AdamW, RMSprop, LAMB"
    )
    if not {torch.optim.Optimizer, Optimizer, *kinds} & {
        type(optimizer),
        *type(optimizer).__bases__,
    }:
        logger.warning(
            "Poptorch does not run Python optimizer code directly: of `%s` only the class that it "
            "derives from takes effect.",
            type(optimizer).__name__,
        )
    for group in optimizer.param_groups:
        if group.get("amsgrad"):
            msg = "Only non-amsgrad Adam/AdamW optimizers are supported."
            raise ValueError(msg)
        if group.get("maximize"):
            raise NotEmulatedError(
                f"{type(optimizer).__name__}(maximize=True)", "the device always minimises the loss"
            )
        assert group.get("centered") == optimizer.param_groups[0].get("centered"), (
            "All parameter groups must have the same value for the 'centered' attribute"
        )


def _init_lamb(
    optimizer: Any,
    params: Iterable[Any],
    lr: float = 1e-3,
    betas: Tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    max_weight_norm: float = _FLOAT16_MAX,
) -> None:
    defaults = {
        "lr": lr,
        "betas": betas,
        "eps": eps,
        "weight_decay": weight_decay,
        "max_weight_norm": max_weight_norm,
    }
    torch.optim.Optimizer.__init__(optimizer, params, defaults)


def _with_gradients(optimizer: Any) -> Iterable[Tuple[Dict[str, Any], torch.Tensor]]:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                yield group, param


def _evaluate(closure: Optional[Callable[[], Any]]) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _update_moments(
    state: Dict[str, Any], param: torch.Tensor, betas: Tuple[float, float]
) -> Tuple[torch.Tensor, torch.Tensor, int]:
    """Advance the mean and mean square of a gradient; return them and the count of steps."""
    assert param.grad is not None
    if not state:
        state.update(step=0, exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
    state["step"] += 1
    mean, square = state["exp_avg"], state["exp_avg_sq"]
    mean.lerp_(param.grad, 1 - betas[0])
    square.mul_(betas[1]).addcmul_(param.grad, param.grad, value=1 - betas[1])
    return mean, square, state["step"]


def check_grouped(optimizer: Any) -> None:
    """Check that the device can train grouped parameters with `optimizer`.

    Raises:
        NotEmulatedError: If it would mix the groups.
    """
    what = f"{type(optimizer).__name__} with replicaGrouping(...)"
    if getattr(optimizer, "use_combined_accum", False):
        # PopART 3.4 `sgd1decompose.cpp`
        raise NotEmulatedError(what, "use_combined_accum=True adds up gradients over all groups")
    if getattr(optimizer, "max_grad_norm", float("inf")) != float("inf"):
        raise NotEmulatedError(what, "max_grad_norm clips each replica by a norm of its own")
