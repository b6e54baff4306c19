"""Writes, verifies, discovers, retains and loads checkpoints; a crash at any point leaves existing ones intact.

`CheckpointManager.save` encodes the states (`format/`) and commits the files (`storage/`, with one rename); `loading`
reads them back; `catalog/` finds the checkpoints of a run and decides which are kept.
"""

from onstep.checkpoint.catalog.discovery import CheckpointInfo, checkpoints, newest_verified, resolve
from onstep.checkpoint.catalog.retention import Retention, best, to_delete
from onstep.checkpoint.checkpoint_manager import CheckpointManager
from onstep.checkpoint.components import SharingPattern, StateComponent, Stateful
from onstep.checkpoint.format.codec import check_encodable, encode_state
from onstep.checkpoint.format.decoding import decode_state
from onstep.checkpoint.format.tensor_file import FileDigest, read_header, read_tensors, write_tensors
from onstep.checkpoint.loading import LoadReport
from onstep.checkpoint.saving import SavedCheckpoint, SaveRequest
from onstep.checkpoint.states import ModelState, RngState
from onstep.checkpoint.storage.manifest import Manifest, read_manifest, verify
from onstep.checkpoint.storage.store import FileStore, Operation
from onstep.checkpoint.storage.transaction import SaveTransaction, sweep

__all__ = [
    "CheckpointInfo",
    "CheckpointManager",
    "FileDigest",
    "FileStore",
    "LoadReport",
    "Manifest",
    "ModelState",
    "Operation",
    "Retention",
    "RngState",
    "SaveRequest",
    "SaveTransaction",
    "SavedCheckpoint",
    "SharingPattern",
    "StateComponent",
    "Stateful",
    "best",
    "check_encodable",
    "checkpoints",
    "decode_state",
    "encode_state",
    "newest_verified",
    "read_header",
    "read_manifest",
    "read_tensors",
    "resolve",
    "sweep",
    "to_delete",
    "verify",
    "write_tensors",
]
