"""What a user's options mean for one model: checked, completed, and turned into a geometry."""

from typing import Optional

import torch

from ipu_log_callback.emulator.arguments import Arguments
from ipu_log_callback.emulator.batching import Geometry, narrow_to_micro_batch
from ipu_log_callback.emulator.console import logger
from ipu_log_callback.emulator.enums import OutputMode
from ipu_log_callback.emulator.errors import NotEmulatedError, backend_error, python_error
from ipu_log_callback.emulator.exchange import check_processes
from ipu_log_callback.emulator.execution_strategies import PipelinedExecution, ShardedExecution
from ipu_log_callback.emulator.options import Options
from ipu_log_callback.emulator.replica_groups import ReplicaGroups

__all__ = ["check_ipus", "first_micro_batch", "geometry", "own_options"]


def own_options(options: Optional[Options], training: bool) -> Options:
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
    if training and options.Distributed.numProcesses > 1:
        check_processes(options.Distributed.numProcesses)
    if options.defaultOutputMode():
        options.outputMode(OutputMode.Final if training else OutputMode.All)
    if not training and options.Training.gradient_accumulation != 1:
        message = (
            "You must set poptorch.Options().Training.gradientAccumulation to 1 or leave it as "
            "its default "
            "value (1) when running a poptorch.inferenceModel()."
        )
        strategy = options._execution_strategy
        if isinstance(strategy, PipelinedExecution) and not isinstance(strategy, ShardedExecution):
            message += (
                " Use poptorch.Options().deviceIterations to process a sufficient number of "
                "batches each "
                "run for pipelined execution instead."
            )
        raise python_error(message)
    return options


def check_ipus(options: Options, training: bool) -> None:
    """Check what a compiled model's blocks ask of the device.

    PopTorch 3.4 `Compiler.cpp`, `CompilerImpl.cpp`.
    """
    strategy = options._execution_strategy
    stages = strategy.forward_stages
    if type(strategy) is PipelinedExecution:
        if training and options.Training.gradient_accumulation < 2 * stages - 1:
            raise backend_error(
                "poptorch.Options().Training.gradientAccumulation must be greater than or equal "
                "to the number "
                f"of pipeline stages ({2 * stages - 1}) when using poptorch.PipelinedExecution. "
                "Please note that "
                f"a model with {stages} pipeline stages in PopTorch will have an additional "
                f"{stages - 1} stages "
                "when training.",
                source="popart_compiler/source/Compiler.cpp",
            )
        if not training and options.device_iterations < stages:
            raise backend_error(
                "poptorch.Options().deviceIterations must be greater than or equal to the number "
                "of pipeline "
                f"stages ({stages}) when using PopTorch.PipelinedExecution.",
                source="popart_compiler/source/Compiler.cpp",
            )
    ipus = strategy.ipus * options.replication_factor
    if ipus > 64:
        raise backend_error(
            f"Too many IPUs requested ({ipus}). Experiments that need more than 64 IPUs require "
            "distributed "
            "execution.",
            source="popart_compiler/source/CompilerImpl.cpp",
        )


def geometry(options: Options) -> Geometry:
    """Return what `options` say about the micro-batches of an execution.

    Raises:
        NotEmulatedError: If replicas share inputs and have several micro-batches each.
    """
    size, shared = options.input_group_size, None
    if size > 1:
        if options.device_iterations * options.Training.gradient_accumulation > 1:
            raise NotEmulatedError(
                f"Options.inputReplicaGrouping({size}, ...)",
                "with several micro-batches for each replica (device iterations, gradient "
                "accumulation) PopTorch 3.4 gives replicas of one group different ones "
                "(CompilerImpl.cpp, StepIO::get)",
            )
        shared = ReplicaGroups.arranged(options.input_cgt, size, options.replication_factor)
    return Geometry(
        iterations=options.device_iterations,
        accumulation=options.Training.gradient_accumulation,
        replicas=options.replication_factor,
        mode=OutputMode(options.output_mode),
        period=options.output_return_period,
        shared_inputs=shared,
    )


def first_micro_batch(arguments: Arguments, shape: Geometry) -> Arguments:
    """Return the first micro-batch's part of an execution's arguments, detached.

    Raises:
        AssertionError: If dimension 0 of one is not a multiple of the number of micro-batches.
    """

    def first(tensor: torch.Tensor) -> torch.Tensor:
        part = narrow_to_micro_batch(tensor, shape)
        if not part.requires_grad:
            return part
        logger.warning(
            "Input tensor has requires_grad=True set. This tensor will be detached because "
            "backward pass via "
            "inputs is not supported."
        )
        return part.detach()

    return arguments.map_tensors(first)
