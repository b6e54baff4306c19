"""Uploads to the Hugging Face Hub while a run trains.

`Repository` is one there, reached through `huggingface_hub`; `Uploads` commits to it in the background, one commit
after the other; `Pusher` decides what of a run is committed, and when, and keeps the files as they are until then.
"""

from onstep.hub.pusher import STRATEGIES, Pusher
from onstep.hub.repository import Repository
from onstep.hub.uploads import Upload, Uploads

__all__ = ["STRATEGIES", "Pusher", "Repository", "Upload", "Uploads"]
