"""Data behind URLs of object stores: `objects` finds what a URL names, `cache` keeps what was downloaded, and
`local_copy` gives the local paths that training reads.
"""
