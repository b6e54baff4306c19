"""The sections of a configuration, a dataclass each; every field is declared by `onstep.config.section.option`.

A new key is one field here: validation, conversion, classes of changes, `onstep config` and the documentation follow.
"""
