"""Uploads to the Hugging Face Hub while a run trains.

`repository` has one there, reached through `huggingface_hub`; `uploads` commits to it in the background, one commit
after the other, and `waiting` lets all ranks wait for them; `pusher` decides what of a run is committed, and when, and
keeps the files as they are until then.
"""
