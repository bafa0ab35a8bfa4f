"""`PoplarExecutor`: what `trainingModel` and `inferenceModel` return.

It compiles the wrapped module at its first call and executes it afterwards (PopTorch 3.4
`_poplar_executor.py`).
"""

import copy
from functools import partial
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

from ipu_log_callback.emulator import device_backend, optim, persistence, settings, weights
from ipu_log_callback.emulator.arguments import Arguments, ArgumentsParser
from ipu_log_callback.emulator.compilation import Request, compile_step
from ipu_log_callback.emulator.compile_hooks import compiling
from ipu_log_callback.emulator.console import logger
from ipu_log_callback.emulator.device_tensor import is_device_tensor
from ipu_log_callback.emulator.enums import ConnectionType, OutputMode, ReductionType
from ipu_log_callback.emulator.errors import NotEmulatedError, backend_error, python_error
from ipu_log_callback.emulator.executable import Executable
from ipu_log_callback.emulator.inspection import Inspection
from ipu_log_callback.emulator.options import Options
from ipu_log_callback.emulator.persistence import SavedModel
from ipu_log_callback.emulator.replica_groups import (
    GroupableParameter,
    GroupedParameter,
    grouped_parameters,
)
from ipu_log_callback.emulator.structures import rebuild

__all__ = ["PoplarExecutor", "inferenceModel", "load", "trainingModel"]

del device_backend  # imported so that PyTorch's dispatcher answers with PopTorch's errors


class PoplarExecutor(Inspection):
    """A module bound to a device. Made by `trainingModel` and `inferenceModel`."""

    def __init__(
        self,
        model: torch.nn.Module,
        options: Optional[Options],
        training: bool,
        poptorch_version: str = "",
        optimizer: Optional[Any] = None,
        user_model: Optional[torch.nn.Module] = None,
    ) -> None:
        """Bind `model`; see `trainingModel` and `inferenceModel`.

        Args:
            model: What is called; shares parameters and buffers with `user_model`.
            options: Frozen from here on; a copy of them is used.
            training: Whether weights are trained.
            poptorch_version: Unused.
            optimizer: Updates the weights; plain SGD with a rate of 0.01 by default.
            user_model: The module whose class is replaced in training.
        """
        del poptorch_version
        super().__init__()
        self._model = model
        self._user_model = user_model if user_model is not None else model
        self.per_replica_params: Dict[str, Tuple[Any, int, Any]] = {}
        self._training = training
        self._options = settings.own_options(options, training)
        # The parser must see the signature before the model's class is replaced.
        self._args_parser = ArgumentsParser(model)
        self._outputs_structure: Any = None
        if self._options.exists("random_seed"):
            self._cached_rng_state = [self._options.random_seed]
        if training:
            self.setOptimizer(optimizer or optim.SGD(self._user_model.parameters(), lr=0.01))
        elif optimizer is not None:
            msg = "Optimizer should be None for inference"
            raise AssertionError(msg)
        self._options._freeze()
        if training:
            weights.wrap(self._user_model, self)

    # What it is made of

    @property
    def model(self) -> torch.nn.Module:
        """The wrapped module."""
        return self._user_model

    @property
    def options(self) -> Options:
        """The executor's own, frozen copy of the options."""
        return self._options

    def __getattr__(self, attr: str) -> Any:
        if attr == "_user_model":  # not yet set, for instance while being unpickled
            raise AttributeError(attr)
        value = getattr(self._user_model, attr)
        if isinstance(value, torch.nn.Parameter):
            return GroupableParameter(self.per_replica_params, attr, value)
        return value

    def __repr__(self) -> str:
        return repr(self._user_model)

    # Compilation

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile for arguments like these; ignored with a warning if already compiled."""
        arguments = self._args_parser(args, kwargs, is_first=True)
        if self.isCompiled():
            logger.warning("Call to compile() ignored: the executable is already compiled")
            return
        self._compile(arguments)

    def _compile(self, arguments: Arguments) -> None:
        geometry = settings.geometry(self._options)
        request = Request(
            model=self._model,
            arguments=settings.first_micro_batch(arguments, geometry),
            training=self._training,
            geometry=geometry,
            processes=self._options.Distributed.numProcesses,
            gradients_summed=(
                self._options.Training.accumulation_and_replication_reduction_type
                == ReductionType.Sum
            ),
            buffers_broadcast=self._options.broadcast_buffers,
            grouped=self._grouped_parameters(),
            anchors=[
                self._anchor_name(anchor) for anchor in self._options.anchored_tensors.values()
            ],
            traced=self._options.Jit.trace_model,
            surroundings=partial(compiling, self._model, self._options, self._training),
        )
        executable, structure = compile_step(request)
        settings.check_ipus(self._options, self._training)
        self._check_updatable_buffers()
        self._log_anchors()
        self._outputs_structure = structure
        self._executable_inputs = arguments
        executable.seed_random_numbers(torch.initial_seed())
        self._executable = executable
        self._tally.add(compiles=1)
        if self._options.connection_type != ConnectionType.Never:
            self._is_attached = True
            self._on_device_attach()

    def _grouped_parameters(self) -> Dict[str, GroupedParameter]:
        replicas = self._options.replication_factor
        grouped = grouped_parameters(self.per_replica_params, replicas)
        if not grouped:
            return grouped
        if self._options.Jit.trace_model:
            raise NotEmulatedError("replicaGrouping(...)", "PopTorch's trace mode has none")
        if self._options.Distributed.numProcesses > 1:
            raise NotEmulatedError(
                "replicaGrouping(...)", "groups are of the replicas of one process only"
            )
        if self._optimizer is not None:
            optim.check_grouped(self._optimizer)
        return grouped

    def _check_updatable_buffers(self) -> None:
        unknown = set(self._options._Popart.options.get("updatableNamedBuffers", ()))
        unknown -= set(dict(self._model.named_buffers()))
        if unknown:
            raise backend_error(
                f"Updatable named buffers not found in the model: {', '.join(sorted(unknown))}",
                source="popart/ir.cpp",
                kind="popart_exception",
            )

    def _log_anchors(self) -> None:
        for long_name, is_default, mode, period in self._options.anchored_tensors.values():
            shown = OutputMode(self._options.output_mode) if is_default else mode
            name = "Sum" if shown == OutputMode.Sum else shown.name.upper()
            logger.debug("Adding anchor %s %s/%d", long_name, name, period)

    def destroy(self) -> None:
        """Release the device; a training module is given back with the present weights."""
        if not self.isCompiled():
            return
        if self._training:
            self.copyWeightsToHostIfNeeded()
            assert self._optimizer is not None
            self._optimizer.state_dict()
        self._executable = None
        self._is_attached = False
        if not self._training:
            return
        if not weights.is_wrapped(self._user_model):
            raise python_error("model was never wrapped")
        weights.unwrap(self._user_model)

    # Execution

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Execute the model, compiling it first if need be.

        Takes the arguments of the wrapped module.

        Returns:
            What the step returned, with every tensor from the device replaced as the output mode
            says.
        """
        assert self._options.connection_type != ConnectionType.Never, (
            "Trying to run a model on an offline device (ConnectionType.Never): use "
            "model.compile(inputs) "
            "instead of model(inputs)"
        )
        arguments = self._args_parser(args, kwargs, is_first=not self.isCompiled())
        if not self.isCompiled():
            self._compile(arguments)
        if not self._is_attached:
            self.attachToDevice()
        if not self._training:
            self._follow_training_twin()
        executable = self._compiled()
        assert self._executable_inputs is not None
        self._executable_inputs.check(arguments)
        inputs = arguments.tensors(self._executable_inputs)
        self._write_optimizer_state_if_needed()
        outputs, anchored = executable.execute(inputs)
        self._after_execution(executable, outputs, anchored)
        written = executable.layout.written_inputs
        for index, value in zip(written, outputs[executable.layout.outputs :]):
            inputs[index].copy_(value)
        outputs = outputs[: executable.layout.outputs]
        for output in outputs:
            output.backward = _backward_on_output  # type: ignore[method-assign]  # an error to help users
        if self._outputs_structure is None:
            return None
        return rebuild(self._outputs_structure, outputs, is_device_tensor)

    def _after_execution(
        self, executable: Executable, outputs: List[torch.Tensor], anchored: Dict[str, torch.Tensor]
    ) -> None:
        for short_name, anchor in self._options.anchored_tensors.items():
            self._anchor_memory[short_name] = anchored[self._anchor_name(anchor)]
        if self._training:
            self._dirty_host_weights = True
        self._cached_rng_state = None
        if isinstance(self._optimizer, optim.Optimizer):
            self._optimizer.host_state_is_dirty = True
        returned = [*outputs, *anchored.values()]
        geometry = executable.layout.geometry
        self._tally.add(
            executions=1,
            micro_batches=geometry.total,
            stream_copies=len(returned) * geometry.results,
        )
        size = sum(value.numel() * value.element_size() for value in returned)
        self._tally.set_last_outputs(len(returned), size)

    def _follow_training_twin(self) -> None:
        """Fetch the weights of a training model that shares this module, if they moved on."""
        copy_if_needed = getattr(self._user_model, "copyWeightsToHostIfNeeded", None)
        if not callable(copy_if_needed):
            return
        copy_if_needed()
        version = self._user_model._host_weights_version
        if self._host_weights_version != version:
            logger.debug("Implicit copyWeightsToDevice()")
            self._upload()
            self._tally.add(implicit_copies_to_device=1)
            self._host_weights_version = version  # type: ignore[assignment]  # a wrapped module's number

    # Files

    def save(self, filename: str, export_model: bool = True, save_rng_state: bool = True) -> None:
        """Write the compiled model to a file.

        Args:
            filename: Where to; directories are made.
            export_model: Include the module, so that `load` can restore everything.
            save_rng_state: Include the device's random numbers.

        Raises:
            Error: If it is not compiled.
        """
        self._compiled()
        assert self._executable_inputs is not None
        saved = SavedModel(self._executable_inputs, self._options)
        if export_model:
            saved.training = self._training
            saved.model = self._user_model
            saved.optimizer = self._optimizer
            saved.optimizer_state = self._optimizer.state_dict() if self._optimizer else None
        if save_rng_state:
            saved.rng_state = self.rng_state
        persistence.write(filename, saved)

    def compileAndExport(
        self, filename: str, *args: Any, export_model: bool = True, **kwargs: Any
    ) -> None:
        """Compile for arguments like these, and `save`."""
        self.compile(*args, **kwargs)
        self.save(filename, export_model)

    def loadExecutable(self, filename: str) -> None:
        """Compile as the model in a file was compiled.

        Raises:
            Error: If the file cannot be read.
        """
        try:
            saved = persistence.read(filename)
        except AssertionError as err:
            raise python_error(str(err)) from err
        self._compile(saved.arguments)


def _backward_on_output(*args: Any, **kwargs: Any) -> None:
    raise python_error(
        "backward() cannot be called explicitly on outputs of a PopTorch model. If you're using a "
        "trainingModel, the backwards pass is performed automatically when invoking the model. "
        "If you're "
        "using an inferenceModel, you should use a trainingModel instead."
    )


def trainingModel(
    model: Any, options: Optional[Options] = None, optimizer: Optional[Any] = None
) -> PoplarExecutor:
    """Wrap a module for training on the device.

    Args:
        model: The module, or an executor whose module is meant. Its class is replaced until
            `PoplarExecutor.destroy`.
        options: Frozen by this call.
        optimizer: Of PyTorch or of `poptorch.optim`; plain SGD with a rate of 0.01 by default.

    Raises:
        RuntimeError: If the module is wrapped already.
    """
    if isinstance(model, PoplarExecutor):
        model = model._user_model
    if weights.is_wrapped(model):
        msg = (
            "Model has already been wrapped in 'poptorch.trainingModel'. Call model.destroy() on "
            "the model "
            "to unwrap before wrapping again."
        )
        raise RuntimeError(msg)
    return PoplarExecutor(copy.copy(model), options, True, optimizer=optimizer, user_model=model)


def inferenceModel(model: Any, options: Optional[Options] = None) -> PoplarExecutor:
    """Wrap a module, or the module of another executor, for inference on the device.

    Args:
        model: The module or executor.
        options: Frozen by this call.
    """
    if isinstance(model, PoplarExecutor):
        model = model._user_model
    return PoplarExecutor(copy.copy(model), options, False)


def load(filename: str, edit_opts_fn: Optional[Callable[[Options], None]] = None) -> PoplarExecutor:
    """Restore a model from a file that `PoplarExecutor.save` wrote with its module.

    Args:
        filename: The file.
        edit_opts_fn: Edits the options before they are used.

    Raises:
        AssertionError: If the file is not a compiled model, or holds no module.
    """
    saved = persistence.read(filename)
    hint = (
        f"{filename} is a valid PopTorch file but was created with 'export_model=False' which "
        "means you need to re-create the PopTorch model using poptorch.inferenceModel or "
        f'poptorch.trainingModel then call poptorch_model.loadExecutable("{filename}").'
    )
    assert saved.model is not None, hint
    assert saved.training is not None, hint
    if edit_opts_fn is not None:
        edit_opts_fn(saved.options)
    if saved.optimizer_state is not None:
        saved.optimizer.load_state_dict(saved.optimizer_state)
    if saved.training:
        executor = trainingModel(saved.model, saved.options, saved.optimizer)
    else:
        executor = inferenceModel(saved.model, saved.options)
    executor.loadExecutable(filename)
    if saved.rng_state is not None:
        executor.rng_state = saved.rng_state
    return executor
