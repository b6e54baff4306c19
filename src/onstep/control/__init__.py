"""Commands to a running job: what they are, how they reach it, and what it shows of itself. Does not import torch.

`commands` is the table of commands, `inbox` hands them to the training thread, `feed` holds what a job shows,
`registry` lists the jobs of this user, `serving` is the server, `page` has the files of the page that it serves.
"""
