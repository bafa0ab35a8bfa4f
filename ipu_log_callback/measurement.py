"""What looking costs, measured: seconds of executions, and of this package on the host."""

from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Tuple

__all__ = ["Measurement", "Seconds", "log_device_latencies"]


@dataclass
class Seconds:
    """Times added up.

    Args:
        count: How many.
        total: Their sum, in seconds.
    """

    count: int = 0
    total: float = 0.0

    def add(self, seconds: float) -> None:
        """Add one."""
        self.count += 1
        self.total += seconds

    @property
    def mean(self) -> float:
        """Seconds of one, on average."""
        return self.total / self.count if self.count else 0.0


@dataclass
class Measurement:
    """Times of the executions that a callback saw, over all of its runs.

    Args:
        executions: Seconds of an execution by step, and by whether anything was anchored. The
            execution that compiles is left out.
        host: Seconds that this package took on the host after an execution, by step.
    """

    executions: Dict[Tuple[str, bool], Seconds] = field(default_factory=dict)
    host: Dict[str, Seconds] = field(default_factory=dict)

    def executed(self, step: str, anchored: bool, seconds: float) -> None:
        """Note one execution."""
        self.executions.setdefault((step, anchored), Seconds()).add(seconds)

    def replayed(self, step: str, seconds: float) -> None:
        """Note what replay and the rest of the host's work took."""
        self.host.setdefault(step, Seconds()).add(seconds)

    def summary(self) -> List[str]:
        """One line for each step, with and without anchors where both were seen."""
        lines = []
        for step in dict.fromkeys(step for step, _ in self.executions):
            parts = [
                f"{self.executions[step, anchored].mean:.3g} s per execution {text} "
                f"({self.executions[step, anchored].count} seen)"
                for anchored, text in ((True, "with anchors"), (False, "without anchors"))
                if (step, anchored) in self.executions
            ]
            host = self.host.get(step, Seconds()).mean
            lines.append(f"{step}: {', '.join(parts)}; {host:.3g} s on the host after each")
        return lines


def log_device_latencies(executor: Any, log: Callable[[str, float], None]) -> None:
    """Log PopTorch's own counters of the last execution, where the backend has them.

    `getLatency` is the round trip, `getIpuHostLatency` the way back: minimum, maximum and average
    in seconds (PopTorch 3.4 `_poplar_executor.py`); all 0 where nothing was counted.
    """
    for key, method in (
        ("ipu_log/round_trip_seconds", "getLatency"),
        ("ipu_log/ipu_to_host_seconds", "getIpuHostLatency"),
    ):
        latency = getattr(executor, method)()
        if any(latency):
            log(key, float(latency[2]))
