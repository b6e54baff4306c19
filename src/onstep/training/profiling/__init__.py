"""Features that measure a run or look after its memory, and Megatron Bridge's profiling functions.

`instruments` has the features, `profilers` torch's profiler and Nsight Systems.
"""

from onstep.training.profiling.profilers import NsysContext as TNvtxContext
from onstep.training.profiling.profilers import handle_profiling_step, handle_profiling_stop, should_profile_rank

__all__ = ["TNvtxContext", "handle_profiling_step", "handle_profiling_stop", "should_profile_rank"]
