"""Hostile files of every format that Onstep reads: honest files, changed, go through each command that reads them.

Nothing may come of it but a result or a message: no raw error, no hang over 10 s, no growth over 1 GB.

`changes` are strategies of hypothesis; `honest_files` writes what they start from; `doors` are the commands and
functions that read; `formats` puts these together. `one_input` runs in a process of its own, with what is `preloaded`.
"""
