"""Defines how HTTP carries the messages of `protocol`: `http` has paths, headers and bodies, `tokens` the files with
the bearer tokens of servers.
"""
