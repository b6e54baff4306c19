"""The modules that a script imports, as far as they can have to do with a Trainer."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from onstep.explain.source.modules import Module, Sources, is_closed
from onstep.explain.source.resolver import ClassDefinition, FunctionDefinition, ModuleName, Resolver

_OTHERS = ("transformers", "accelerate", "peft", "onstep", "bitsandbytes", "vllm", "deepspeed")
"""Packages whose own classes are not the question."""
_CONCERNED = re.compile(r"Trainer|TrainingArguments|trainer")


def reached_from(first: Module, resolver: Resolver) -> list[Module]:
    """A module, and those that it imports directly and through others, in functions too; itself is the first.

    A module of another package is left out unless its text has the word Trainer. Of a package that imports on first
    use, only what is asked for is reached.
    """
    seen = {first.name: first}
    waiting = [first]
    home = first.name.partition(".")[0]
    while waiting:
        for name in _imported(waiting.pop(0), resolver):
            if name in seen or is_closed(name) or name.partition(".")[0] in _OTHERS:
                continue
            module = resolver.sources.module(name)
            if module is not None and (_CONCERNED.search(module.text) or _is_beside(module, home, resolver.sources)):
                seen[name] = module
                waiting.append(module)
    return list(seen.values())


def _is_beside(module: Module, home: str, sources: Sources) -> bool:
    """Whether a module is of the script's package, or in its directory."""
    top = module.name.partition(".")[0]
    return top == home or any((root / top).exists() or (root / f"{top}.py").exists() for root in sources.roots)


def _imported(module: Module, resolver: Resolver) -> Iterator[str]:
    if resolver.scope(module).lazy:
        return
    for node in module.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _with_parents(alias.name)
        elif isinstance(node, ast.ImportFrom):
            source = module.imported(node)
            yield from _with_parents(source)
            for alias in node.names:
                match resolver.member(source, alias.name):
                    case ModuleName(name):
                        yield name
                    case ClassDefinition() | FunctionDefinition() as definition:
                        yield definition.module.name
                    case _:
                        pass


def _with_parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        yield ".".join(parts[:end])
