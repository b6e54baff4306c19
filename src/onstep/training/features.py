"""Lists the features of the loop in one table, which is their order in every hook, wrapper and session.

The first row is the outermost wrapper; sessions open in this order and close in reverse.
"""

from __future__ import annotations

from typing import Any

from onstep.training.anomalies.finite_weights import FiniteWeights
from onstep.training.anomalies.gate import AnomalyGate
from onstep.training.anomalies.gradient_checks import GradientChecks
from onstep.training.experts.experts import Experts
from onstep.training.fault_tolerance.sections import FaultToleranceSections
from onstep.training.feature import Feature
from onstep.training.interval_log.bridge_log import BridgeLog
from onstep.training.lifecycle.allocation import AllocationEnd
from onstep.training.lifecycle.cuda_graphs import CudaGraphs
from onstep.training.lifecycle.determinism import Determinism
from onstep.training.lifecycle.endings import Endings, TrainingEnd
from onstep.training.lifecycle.environment import EnvironmentVariables, LogLevel, TrackerSessions
from onstep.training.lifecycle.float32 import Float32Products
from onstep.training.lifecycle.mirroring import Mirroring
from onstep.training.lifecycle.rampup import BatchRampup
from onstep.training.lifecycle.recording import Recording
from onstep.training.lifecycle.save_copies import SaveCopies
from onstep.training.lifecycle.signal_handling import DataTimeoutGuard, SignalHandling
from onstep.training.model_parallel.agreement import ModelParallelAgreement
from onstep.training.model_parallel.model_parallel import ForwardPreHooks
from onstep.training.model_parallel.same_tokens import SameTokens
from onstep.training.profiling.attention_logits import AttentionLogits
from onstep.training.profiling.instruments import DeviceSync, Energy, IntervalTime, NvtxRanges, Profilers, StepTimers
from onstep.training.profiling.memory import ManualGarbageCollection, MemoryHistory, MemoryRelease
from onstep.training.rerun.rerun import RerunMachine
from onstep.training.run import Run
from onstep.training.stages.job import Job
from onstep.training.steering.steering import Steering
from onstep.training.stragglers.detector import Stragglers
from onstep.training.stragglers.nvrx import NvrxStragglers
from onstep.training.verification.own_models import OwnModels
from onstep.training.verification.trajectory_hash import TrajectoryHash
from onstep.training.verification.weight_hash import WeightHashes
from onstep.training.watchdog.watchdog import Watching

SETUP: tuple[type[Feature[Run]], ...] = (EnvironmentVariables, LogLevel)
"""Opened by an entry point before the process group is."""

RUN: tuple[type[Feature[Run]], ...] = (
    SignalHandling,  # first: a signal during the set-up already counts, as one during the last upload
    AllocationEnd,  # above the endings: measures the save at the end, too
    Watching,  # above the endings: it sees an error before the callbacks do, and outlives them
    Recording,  # above the endings: its last line says how the run ended
    TrackerSessions,  # above the endings: what `on_run_end` logs still arrives
    Endings,
    Determinism,  # before anything is computed
    Float32Products,
    MemoryHistory,  # before the model is built
    MemoryRelease,
    Mirroring,
)
"""Opened by an entry point before it builds anything, else by `train()`."""

SECTIONS: tuple[type[Feature[Run]], ...] = (FaultToleranceSections,)
"""Opened by an entry point once the run's checkpoints are known."""

TRAINING: tuple[type[Feature[Job]], ...] = (
    TrainingEnd,  # sees an error before anything below closes
    Steering,  # first in what a step may be asked for: repeats come before all else
    DataTimeoutGuard,
    IntervalTime,
    DeviceSync,
    StepTimers,  # outermost of what measures a step
    NvtxRanges,
    Energy,
    Stragglers,
    NvrxStragglers,
    ForwardPreHooks,  # off around everything that reads weights
    SaveCopies,  # before all that may change weights
    AnomalyGate,  # keeps the buffers once, before the first of several runs of a step
    GradientChecks,  # inside it: every step that is about to be applied
    FiniteWeights,  # reads weights: after what brings them up to date
    RerunMachine,  # inside it: may recompute the step, or exit
    Experts,  # inside it: every run of the step restarts the counts
    AttentionLogits,
    CudaGraphs,  # innermost around forward and backward: every run of the step marks its passes
    SameTokens,  # before an update
    ModelParallelAgreement,
    BridgeLog,  # after the gate: sees what was applied
    TrajectoryHash,
    OwnModels,
    WeightHashes,  # after a step: Megatron Bridge's order
    Profilers,
    ManualGarbageCollection,
    BatchRampup,  # last: saves where the next step is larger
)
"""Opened by `train()`."""

STEP: tuple[type[Feature[Job]], ...] = (
    StepTimers,
    NvtxRanges,
    Stragglers,
    AnomalyGate,
    RerunMachine,
    Experts,
    AttentionLogits,
    CudaGraphs,
    ModelParallelAgreement,
)
"""The features of a step that is trained without `train()`."""

FEATURES: tuple[type[Feature[Any]], ...] = (*SETUP, *RUN, *SECTIONS, *TRAINING)
