"""`PoplarExecutor`: what `trainingModel` and `inferenceModel` return.

It compiles the wrapped module at its first call, executes it afterwards, and decides when weights, optimizer states and
random numbers travel between host and device (PopTorch 3.4 `_poplar_executor.py`).
"""

import collections
import copy
from contextlib import contextmanager
from datetime import timedelta
from types import MethodType
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
from torch.utils.hooks import RemovableHandle

from ipu_log_callback.emulator import device_backend, optim, persistence, weights
from ipu_log_callback.emulator.anchors import tensor_names, without_trace_prefix
from ipu_log_callback.emulator.arguments import Arguments, ArgumentsParser
from ipu_log_callback.emulator.batching import Geometry, narrow_to_micro_batch
from ipu_log_callback.emulator.compilation import Request, compile_step
from ipu_log_callback.emulator.console import logger
from ipu_log_callback.emulator.counters import Counters, Tally
from ipu_log_callback.emulator.device_optimizer import DeviceOptimizer
from ipu_log_callback.emulator.device_tensor import is_device_tensor
from ipu_log_callback.emulator.enums import ConnectionType, OutputMode, ReductionType
from ipu_log_callback.emulator.errors import NotEmulatedError, backend_error, python_error
from ipu_log_callback.emulator.executable import Executable
from ipu_log_callback.emulator.execution_strategies import PipelinedExecution, ShardedExecution
from ipu_log_callback.emulator.options import Options
from ipu_log_callback.emulator.persistence import SavedModel
from ipu_log_callback.emulator.structures import rebuild

__all__ = [
    "PoplarExecutor",
    "inferenceModel",
    "isRunningOnIpu",
    "load",
    "registerPostCompileHook",
    "registerPreCompileHook",
    "trainingModel",
]

del device_backend  # imported so that PyTorch's dispatcher answers with PopTorch's errors

_NO_EXECUTABLE = "Model has not been compiled or has been destroyed."

_compilations = 0  # under way


def isRunningOnIpu() -> bool:
    """Whether a step's Python runs for the device at the moment: true only while it is compiled."""
    return _compilations > 0


class PoplarExecutor:
    """A module bound to a device. Made by `trainingModel` and `inferenceModel`."""

    _precompile_hooks: Dict[int, Callable[[], Any]] = collections.OrderedDict()
    _postcompile_hooks: Dict[int, Callable[[], Any]] = collections.OrderedDict()

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
        self._model = model
        self._user_model = user_model if user_model is not None else model
        self._training = training
        self._options = _own_options(options, training)
        # The parser must see the signature before the model's class is replaced.
        self._args_parser = ArgumentsParser(model)
        self._executable: Optional[Executable] = None
        self._executable_inputs: Optional[Arguments] = None
        self._outputs_structure: Any = None
        self._host_weights_version = 0
        self._dirty_host_weights = False
        self._is_attached = False
        self._anchor_memory: Dict[str, torch.Tensor] = {}
        self._tally = Tally()
        self._optimizer: Optional[Any] = None
        self._cached_rng_state: Optional[List[int]] = None
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

    @property
    def counters(self) -> Counters:
        """This executor's costly events."""
        return self._tally.own

    def __getattr__(self, attr: str) -> Any:
        if attr == "_user_model":  # not yet set, for instance while being unpickled
            raise AttributeError(attr)
        return getattr(self._user_model, attr)

    def __repr__(self) -> str:
        return repr(self._user_model)

    # Compilation

    def isCompiled(self) -> bool:
        """Whether the model is compiled, and not destroyed since."""
        return self._executable is not None

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile for arguments like these; ignored with a warning if already compiled."""
        arguments = self._args_parser(args, kwargs, is_first=True)
        if self.isCompiled():
            logger.warning("Call to compile() ignored: the executable is already compiled")
            return
        self._compile(arguments)

    def _compile(self, arguments: Arguments) -> None:
        geometry = _geometry(self._options)
        request = Request(
            model=self._model,
            arguments=_first_micro_batch(arguments, geometry),
            training=self._training,
            geometry=geometry,
            gradients_summed=(
                self._options.Training.accumulation_and_replication_reduction_type
                == ReductionType.Sum
            ),
            buffers_broadcast=self._options.broadcast_buffers,
            anchors=[self._anchor_name(anchor) for anchor in self._options.anchored_tensors.values()],
            traced=self._options.Jit.trace_model,
            surroundings=self._surroundings,
        )
        executable, structure = compile_step(request)
        _check_ipus(self._options, self._training)
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

    def _check_updatable_buffers(self) -> None:
        unknown = set(self._options._Popart.options.get("updatableNamedBuffers", ()))
        unknown -= set(dict(self._model.named_buffers()))
        if unknown:
            raise backend_error(
                f"Updatable named buffers not found in the model: {', '.join(sorted(unknown))}",
                source="popart/ir.cpp",
                kind="popart_exception",
            )

    @property
    def _has_trace_prefix(self) -> bool:
        return self._training and bool(self._options.Jit.trace_model)

    def _anchor_name(self, anchor: List[Any]) -> str:
        name: str = anchor[0]
        return without_trace_prefix(name) if self._has_trace_prefix else name

    def _log_anchors(self) -> None:
        for long_name, is_default, mode, period in self._options.anchored_tensors.values():
            shown = OutputMode(self._options.output_mode) if is_default else mode
            name = "Sum" if shown == OutputMode.Sum else shown.name.upper()
            logger.debug("Adding anchor %s %s/%d", long_name, name, period)

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        """What is different while the step's Python runs."""
        global _compilations
        _compilations += 1
        begun = None
        try:
            if self._options.Jit.trace_model:
                # A trace runs the step more than once; only one run's blocks count.
                strategy = self._options._execution_strategy
                begun = self._model.register_forward_pre_hook(lambda *_: strategy.entered_ipus.clear())
            for hook in list(self._precompile_hooks.values()):
                hook()
            with self._options._execution_strategy.compiling():
                yield
        finally:
            if begun is not None:
                begun.remove()
            for hook in list(self._postcompile_hooks.values()):
                hook()
            _compilations -= 1

    def _compiled(self) -> Executable:
        if self._executable is None:
            raise python_error(_NO_EXECUTABLE)
        return self._executable

    def destroy(self) -> None:
        """Release the device; a training model's module is given back as it was, with the present weights."""
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
        """Execute the model, compiling it first if need be; takes the arguments of the wrapped module.

        Returns:
            What the step returned, with every tensor from the device replaced as the output mode says.
        """
        assert self._options.connection_type != ConnectionType.Never, (
            "Trying to run a model on an offline device (ConnectionType.Never): use model.compile(inputs) "
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
        """Fetch the weights of a training model that shares this model's module, if they moved on."""
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

    # Weights

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Copy the weights to the host if the device's are newer; return whether that was so."""
        if not self._dirty_host_weights:
            return False
        logger.debug("Implicit copyWeightsToHost()")
        self._download()
        self._tally.add(implicit_copies_to_host=1)
        return True

    def copyWeightsToHost(self) -> None:
        """Copy parameters and buffers from the device into the module."""
        self._download()
        self._tally.add(explicit_copies_to_host=1)

    def copyWeightsToDevice(self) -> None:
        """Copy parameters and buffers from the module to the device."""
        self._upload()
        self._tally.add(explicit_copies_to_device=1)

    def _download(self) -> None:
        executable = self._compiled()
        # First, so that reading the module's parameters does not lead back here.
        self._dirty_host_weights = False
        with weights.unwrapped(self._model):
            executable.download(weights.named_state(self._model))
        self._host_weights_version += 1

    def _upload(self) -> None:
        executable = self._compiled()
        self._dirty_host_weights = False
        if self._optimizer is not None:
            self._optimizer.state_dict()
        with weights.unwrapped(self._model):
            executable.upload(weights.named_state(self._model))

    def copyNamedBuffersToDevice(self) -> None:
        """Copy the buffers that the option ``updatableNamedBuffers`` names from the module to the device."""
        executable = self._compiled()
        if "updatableNamedBuffers" not in self._options._Popart.options:
            raise python_error("No named buffers marked as updatable via updatableNamedBuffers option")
        self._dirty_host_weights = False
        if self._optimizer is not None:
            self._optimizer.state_dict()
        named = dict(self._model.named_buffers())
        wanted = self._options._Popart.options["updatableNamedBuffers"]
        executable.upload_buffers({name: named[name] for name in wanted})

    def load_state_dict(self, state_dict: Dict[str, torch.Tensor], strict: bool = True) -> Any:
        """Load a state into the module, and from there to the device if there is one."""
        result = self._user_model.load_state_dict(state_dict, strict)
        if self.isAttachedToDevice():
            logger.debug("load_state_dict: implicit copyWeightsToDevice()")
            self._upload()
            self._tally.add(implicit_copies_to_device=1)
        return result

    # Optimizer

    def setOptimizer(self, optimizer: Any) -> None:
        """Use `optimizer` from here on.

        After compilation only numbers that were not compiled in may differ: the learning rate, in the first place.
        """
        optim.check(optimizer)
        if self.isCompiled() and optimizer is not self._optimizer:
            if isinstance(self._optimizer, optim.Optimizer):
                self._read_optimizer_state_if_needed()
                self._optimizer.state_dict = self._optimizer.get_state_dict  # type: ignore[method-assign]  # undo ours
            if isinstance(optimizer, optim.Optimizer):
                optimizer.ipu_state_is_dirty = True
        if isinstance(optimizer, optim.Optimizer):
            # Reading the state fetches it from the device first.
            optimizer.state_dict = MethodType(PoplarExecutor._optimizer_state_dict, self)  # type: ignore[method-assign]
        self._optimizer = optimizer
        if self._executable is not None and self._executable.optimizer is not None:
            self._executable.optimizer.update(optimizer)
            self._write_optimizer_state_if_needed()

    def _optimizer_state_dict(self) -> Dict[str, Any]:
        assert isinstance(self._optimizer, optim.Optimizer)
        self._read_optimizer_state_if_needed()
        return self._optimizer.get_state_dict()

    def _read_optimizer_state_if_needed(self) -> None:
        optimizer = self._optimizer
        if not isinstance(optimizer, optim.Optimizer) or not optimizer.host_state_is_dirty:
            return
        executable = self._compiled()
        assert executable.optimizer is not None
        names = {id(weight): name for name, weight in executable.weights.items()}
        own_state = torch.optim.Optimizer.state_dict(optimizer)  # type: ignore[arg-type]  # PyTorch's as well
        device_state = {"ipu_state": executable.optimizer.state(names), "ipu_param": {}}
        optimizer.set_state_dict({**device_state, **own_state})
        optimizer.ipu_state_is_dirty = False

    def _write_optimizer_state_if_needed(self) -> None:
        optimizer = self._optimizer
        if not isinstance(optimizer, optim.Optimizer) or not optimizer.ipu_state_is_dirty:
            return
        if optimizer.has_state():
            executable = self._compiled()
            assert executable.optimizer is not None
            self.copyWeightsToHostIfNeeded()
            names = {id(weight): name for name, weight in executable.weights.items()}
            executable.optimizer.load_state(optimizer.state_dict()["ipu_state"], names)
        optimizer.ipu_state_is_dirty = False

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

    # Device

    def isAttachedToDevice(self) -> bool:
        """Whether the model is compiled and on a device."""
        return self.isCompiled() and self._is_attached

    def attachToDevice(self) -> None:
        """Attach again after `detachFromDevice`; weights, optimizer state and random numbers travel to the device."""
        self._compiled()
        assert self._options.connection_type != ConnectionType.Never, (
            "Trying to attach to an offline device (ConnectionType.Never)"
        )
        if self._is_attached:
            raise python_error("Device is already attached")
        self._is_attached = True
        self._on_device_attach()

    def detachFromDevice(self) -> None:
        """Release the device but keep the compiled model; weights, states and random numbers come to the host."""
        self._compiled()
        if not self._is_attached:
            raise python_error("Device is not attached")
        self._cached_rng_state = self.rng_state
        if self._training:
            self.copyWeightsToHostIfNeeded()
            self._read_optimizer_state_if_needed()
        self._is_attached = False

    def _on_device_attach(self) -> None:
        executable = self._compiled()
        self._upload()
        self._tally.add(implicit_copies_to_device=1)
        optimizer = self._optimizer
        if optimizer is not None:
            if executable.optimizer is None:
                executable.optimizer = DeviceOptimizer(optimizer, self._device_weight(executable))
            if isinstance(optimizer, optim.Optimizer):
                if optimizer.has_state():
                    optimizer.ipu_state_is_dirty = True
                    self._write_optimizer_state_if_needed()
                else:
                    optimizer.host_state_is_dirty = True
                    optimizer.ipu_state_is_dirty = False
        if self._cached_rng_state is not None:
            executable.rng_state = self._cached_rng_state

    def _device_weight(self, executable: Executable) -> Callable[[torch.Tensor], torch.Tensor]:
        by_id, by_address = {}, {}
        for name, param in self._model.named_parameters():
            if name in executable.weights:
                by_id[id(param)] = by_address[param.data_ptr()] = executable.weights[name]

        def find(param: torch.Tensor) -> torch.Tensor:
            return by_id[id(param)] if id(param) in by_id else by_address[param.data_ptr()]

        return find

    @property
    def rng_state(self) -> List[int]:
        """Seed and state of the device's random numbers."""
        executable = self._compiled()
        if self._cached_rng_state is None or len(self._cached_rng_state) == 1:
            self._cached_rng_state = executable.rng_state
        return self._cached_rng_state

    @rng_state.setter
    def rng_state(self, state: List[int]) -> None:
        executable = self._compiled()
        self._cached_rng_state = list(state)
        if self.isAttachedToDevice():
            executable.rng_state = self._cached_rng_state

    # Inspection

    def getTensorNames(self) -> List[str]:
        """Names of the compiled model's tensors, to be used in ``Options.anchorTensor``."""
        assert self._executable is not None, "Model must be compiled before calling getTensorNames"
        layout = self._executable.layout
        assert self._executable_inputs is not None
        inputs = len(self._executable_inputs.tensors(self._executable_inputs))
        prefix = "model." if self._has_trace_prefix else ""
        states = [prefix + name for name in (*layout.parameters, *layout.buffers)]
        return tensor_names(states, [prefix + name for name in layout.trained], inputs)

    def getAnchoredTensor(self, short_name: str) -> torch.Tensor:
        """The anchored tensor's values from the last execution."""
        assert short_name in self._anchor_memory, f"No tensor with name {short_name} found."
        return self._anchor_memory[short_name]

    def _debugGetPopartIR(self) -> str:
        return self._compiled().program.source

    def getPerfCounters(self) -> Dict[str, List[List[float]]]:
        """PopTorch's structure of time stamps, without any: the emulator measures no time."""
        return {name: [[]] for name in ("input", "input_complete", "output", "output_complete")}

    def _no_latency(self) -> Tuple[float, float, float]:
        return (0.0, 0.0, 0.0)

    getHostIpuLatency = getComputeLatency = getIpuHostLatency = getLatency = _no_latency

    def cycleCount(self) -> int:
        """Refused: there is no hardware whose cycles could be counted.

        Raises:
            Error: If ``Options.logCycleCount`` is off or nothing was executed.
            NotEmulatedError: Otherwise.
        """
        if not self._options._Popart.options["instrumentWithHardwareCycleCounter"]:
            raise python_error(
                "Cycle count logging is disabled. Please set option logCycleCount to True to enable."
            )
        if not self.isCompiled():
            raise python_error("Please run the model at least once before obtaining cycle count.")
        raise NotEmulatedError("cycleCount()", "there is no hardware whose cycles could be counted")

    def compilationTime(self) -> timedelta:
        """Zero: times of the emulator mean nothing."""
        if not self.isCompiled():
            raise python_error("Please compile the model before obtaining compilation time.")
        if not self._options._show_compilation_progress_bar:
            raise python_error("Please set showCompilationProgressBar option to obtain compilation time.")
        return timedelta(0)


def _own_options(options: Optional[Options], training: bool) -> Options:
    """Freeze the user's options; return a copy with the output mode's default filled in."""
    if options is None:
        options = Options()
    elif isinstance(options, Options):
        options._freeze()
        options = options.clone()
    else:
        raise python_error(
            f"Invalid type: 'options' is of type {type(options)} (Expected poptorch.Options)"
        )
    if options.Distributed.numProcesses > 1:
        raise NotEmulatedError(
            "Options.Distributed with several processes", "there is no exchange between processes"
        )
    if options.defaultOutputMode():
        options.outputMode(OutputMode.Final if training else OutputMode.All)
    if not training and options.Training.gradient_accumulation != 1:
        message = (
            "You must set poptorch.Options().Training.gradientAccumulation to 1 or leave it as its default "
            "value (1) when running a poptorch.inferenceModel()."
        )
        strategy = options._execution_strategy
        if isinstance(strategy, PipelinedExecution) and not isinstance(strategy, ShardedExecution):
            message += (
                " Use poptorch.Options().deviceIterations to process a sufficient number of batches each "
                "run for pipelined execution instead."
            )
        raise python_error(message)
    return options


def _check_ipus(options: Options, training: bool) -> None:
    """Check what a compiled model's blocks ask of the device (PopTorch 3.4 `Compiler.cpp`, `CompilerImpl.cpp`)."""
    strategy = options._execution_strategy
    stages = strategy.forward_stages
    if type(strategy) is PipelinedExecution:
        if training and options.Training.gradient_accumulation < 2 * stages - 1:
            raise backend_error(
                "poptorch.Options().Training.gradientAccumulation must be greater than or equal to the number "
                f"of pipeline stages ({2 * stages - 1}) when using poptorch.PipelinedExecution. Please note that "
                f"a model with {stages} pipeline stages in PopTorch will have an additional {stages - 1} stages "
                "when training.",
                source="popart_compiler/source/Compiler.cpp",
            )
        if not training and options.device_iterations < stages:
            raise backend_error(
                "poptorch.Options().deviceIterations must be greater than or equal to the number of pipeline "
                f"stages ({stages}) when using PopTorch.PipelinedExecution.",
                source="popart_compiler/source/Compiler.cpp",
            )
    ipus = strategy.ipus * options.replication_factor
    if ipus > 64:
        raise backend_error(
            f"Too many IPUs requested ({ipus}). Experiments that need more than 64 IPUs require distributed "
            "execution.",
            source="popart_compiler/source/CompilerImpl.cpp",
        )


def _geometry(options: Options) -> Geometry:
    return Geometry(
        iterations=options.device_iterations,
        accumulation=options.Training.gradient_accumulation,
        replicas=options.replication_factor,
        mode=OutputMode(options.output_mode),
        period=options.output_return_period,
    )


def _first_micro_batch(arguments: Arguments, geometry: Geometry) -> Arguments:
    def first(tensor: torch.Tensor) -> torch.Tensor:
        part = narrow_to_micro_batch(tensor, geometry)
        if not part.requires_grad:
            return part
        logger.warning(
            "Input tensor has requires_grad=True set. This tensor will be detached because backward pass via "
            "inputs is not supported."
        )
        return part.detach()

    return arguments.map_tensors(first)


def _backward_on_output(*args: Any, **kwargs: Any) -> None:
    raise python_error(
        "backward() cannot be called explicitly on outputs of a PopTorch model. If you're using a "
        "trainingModel, the backwards pass is performed automatically when invoking the model. If you're "
        "using an inferenceModel, you should use a trainingModel instead."
    )


def trainingModel(
    model: Any, options: Optional[Options] = None, optimizer: Optional[Any] = None
) -> PoplarExecutor:
    """Wrap a module for training on the device.

    Args:
        model: The module, or an executor whose module is meant. Its class is replaced until `PoplarExecutor.destroy`.
        options: Frozen by this call.
        optimizer: Of PyTorch or of `poptorch.optim`; plain SGD with a rate of 0.01 by default.

    Raises:
        RuntimeError: If the module is wrapped already.
    """
    if isinstance(model, PoplarExecutor):
        model = model._user_model
    if weights.is_wrapped(model):
        msg = (
            "Model has already been wrapped in 'poptorch.trainingModel'. Call model.destroy() on the model "
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


def load(
    filename: str, edit_opts_fn: Optional[Callable[[Options], None]] = None
) -> PoplarExecutor:
    """Restore a model from a file that `PoplarExecutor.save` wrote with its module.

    Args:
        filename: The file.
        edit_opts_fn: Edits the options before they are used.

    Raises:
        AssertionError: If the file is not a compiled model, or holds no module.
    """
    saved = persistence.read(filename)
    assert saved.model is not None and saved.training is not None, (
        f"{filename} is a valid PopTorch file but was created with 'export_model=False' which means you need "
        "to re-create the PopTorch model using poptorch.inferenceModel or poptorch.trainingModel then call "
        f'poptorch_model.loadExecutable("{filename}").'
    )
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


def registerPreCompileHook(hook: Callable[[], Any]) -> RemovableHandle:
    """Call `hook` before the step's Python runs, in every compilation.

    Raises:
        RuntimeError: If it is not callable.
    """
    return _register(PoplarExecutor._precompile_hooks, hook, "Pre-compile")


def registerPostCompileHook(hook: Callable[[], Any]) -> RemovableHandle:
    """Call `hook` after the step's Python ran, in every compilation.

    Raises:
        RuntimeError: If it is not callable.
    """
    return _register(PoplarExecutor._postcompile_hooks, hook, "Post-compile")


def _register(hooks: Dict[int, Callable[[], Any]], hook: Any, kind: str) -> RemovableHandle:
    if not callable(hook):
        msg = f"{kind} hook must be callable"
        raise RuntimeError(msg)
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
