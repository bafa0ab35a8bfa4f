"""Which replicas share a weight, or an input (PopTorch 3.4 user guide, "Grouping tensor weights").

A grouped parameter is ``[groups, *shape]`` on the host and ``[*shape]`` on each replica. With one
group there is nothing to divide: every replica has the whole tensor (PopART 3.4
`variablesettings.cpp`).
"""

import dataclasses
from typing import Any, Dict, List, Mapping, Tuple

import torch

from ipu_log_callback.emulator.enums import CommGroupType, VariableRetrievalMode
from ipu_log_callback.emulator.errors import backend_error
from ipu_log_callback.emulator.refusals import described

__all__ = ["GroupableParameter", "GroupedParameter", "ReplicaGroups", "grouped_parameters"]


@dataclasses.dataclass(frozen=True)
class ReplicaGroups:
    """A partition of the replicas.

    Attributes:
        of: For each replica, the number of its group.
    """

    of: Tuple[int, ...]

    @classmethod
    def arranged(cls, kind: CommGroupType, size: int, replicas: int) -> "ReplicaGroups":
        """Divide `replicas` into groups of `size` (which ``All`` and ``NoGrouping`` ignore).

        Raises:
            Error: If `size` does not divide `replicas`.
        """
        if kind in (CommGroupType.All, CommGroupType.NoGrouping):
            size = replicas if kind == CommGroupType.All else 1
        if size < 1:
            raise backend_error(
                "VariableSettings had 1 errors!",
                source="popart/variablesettings.cpp",
                kind="popart_internal_exception",
            )
        if replicas % size:
            raise backend_error(
                "The number of replicas in a `popart::ReplicaGrouping` must be divisible by the "
                "product of the stride and the group size.",
                source="popart/replicagrouping.cpp",
                kind="popart_exception",
            )
        count = replicas // size
        if kind == CommGroupType.Orthogonal:
            return cls(tuple(replica % count for replica in range(replicas)))
        return cls(tuple(replica // size for replica in range(replicas)))

    @property
    def count(self) -> int:
        """Number of groups."""
        return max(self.of) + 1

    @property
    def first(self) -> List[int]:
        """The first replica of each group, whose values come back to the host."""
        return [self.of.index(group) for group in range(self.count)]


@dataclasses.dataclass(frozen=True)
class GroupedParameter:
    """How one parameter is divided.

    Attributes:
        groups: The replicas that share a value of it.
        mode: Which replicas' values come back.
    """

    groups: ReplicaGroups
    mode: VariableRetrievalMode

    def check(self, name: str, host: torch.Tensor) -> None:
        """Check that the host's tensor has a value for each group, and can take what comes back.

        Raises:
            Error: If it is not contiguous, its dimension 0 is not the number of groups, or
                ``AllReplicas`` returns more values than it holds.
        """
        count, replicas = self.groups.count, len(self.groups.of)
        if not host.is_contiguous():
            raise backend_error(
                f"Data source must be contiguous: {described(host)}",
                source="poptorch/source/dispatch_tracer/ValueMapper.cpp",
            )
        if len(host) != count:
            raise backend_error(
                "Return mismatch with possibly appended outer dimension "
                f'({len(host)}) of Tensor: "{name}". should match numGroups: {count}',
                source="popart/variablesettings.cpp",
                kind="popart_internal_exception",
            )
        if self.mode == VariableRetrievalMode.AllReplicas and count != replicas:
            # PopTorch's buffer is the host's tensor, one value for each group, in either mode.
            raise backend_error(
                "The shape of the MutableVoidData for IO does not not match the expected write "
                f"region of this tensor. Tensor Write ({host.dim() - 1}): "
                f"{[replicas, *host.shape[1:]]} != MutableVoidData ({host.dim()}): "
                f"{list(host.shape)}",
                source="popart/tensor.cpp",
                kind="popart_internal_exception",
            )


def grouped_parameters(
    settings: Mapping[str, Tuple[Any, int, Any]], replicas: int
) -> Dict[str, GroupedParameter]:
    """Return how parameters are divided, by name; those with one group are left out.

    Args:
        settings: The arguments of ``replicaGrouping`` by the parameter's name.
        replicas: Number of replicas.
    """
    grouped = {}
    for name, (kind, size, mode) in settings.items():
        groups = ReplicaGroups.arranged(CommGroupType(kind), size, replicas)
        if groups.count > 1:
            grouped[name] = GroupedParameter(groups, VariableRetrievalMode(mode))
    return grouped


class GroupableParameter:
    """What an executor shows of its module's own parameters.

    Not a tensor, as in PopTorch 3.4 (`_poplar_executor.py`, `__getattr__`): the grouping belongs to
    the executor, for two of them may share a module.
    """

    def __init__(
        self, settings: Dict[str, Tuple[Any, int, Any]], name: str, parameter: torch.nn.Parameter
    ) -> None:
        self._settings = settings
        self._name = name
        self._parameter = parameter

    def replicaGrouping(
        self,
        comm_group_type: CommGroupType,
        shards: int,
        variable_retrieval_mode: VariableRetrievalMode,
    ) -> None:
        """Give each group of replicas a value of its own; has an effect until compilation.

        The parameter's dimension 0 counts the groups; the step sees the rest.

        Args:
            comm_group_type: How replicas are arranged in groups.
            shards: Replicas in a group.
            variable_retrieval_mode: Which replicas' values come back.
        """
        self._settings[self._name] = (comm_group_type, shards, variable_retrieval_mode)

    def __getattr__(self, name: str) -> Any:
        # Not `self._parameter`: a copy in the making has none yet.
        return getattr(object.__getattribute__(self, "_parameter"), name)
