"""A seeded fuzzer over every format that Onstep reads: honest files, changed, go through each command that reads them.

Nothing may come of it but a result or a message: no raw error, no hang over 10 s, no growth over 1 GB. An input is a
function of (format, seed, index) alone: `python -m tests.support.faults.fuzz FORMAT --seed 1 --index 123` repeats one.

`byte_changes` knows nothing of a format, `value_changes` changes JSON and YAML as values, `file_changes` picks among
them by the kind of a file; `honest_files` writes what they start from; `doors` are the commands and functions that
read; `formats` puts these together. `one_input` runs in a forked child, `campaign` forks, watches and counts.
"""
