"""A JSON schema of configuration files, made from the declarations of the keys; editors complete and check with it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, get_args, get_origin

from onstep.config.bridge.own_values import ACTIVATIONS, FUNCTIONS
from onstep.config.bridge.rules import Rule
from onstep.config.bridge.values import TARGET
from onstep.config.bridge_outcomes import rules
from onstep.config.field_types import members_of
from onstep.config.keys import KEYS, Key
from onstep.config.section import Bound

Schema = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_OBJECT: Schema = {"$ref": "#/$defs/object of Megatron Bridge"}
_FUNCTION = rf"^({'|'.join(map(re.escape, FUNCTIONS))})(.*\.)?({'|'.join(ACTIVATIONS)})$"
_WEIGHT_TYPES: list[Schema] = [_OBJECT, {"enum": ["torch.float32", "torch.bfloat16"]}]
_BRIDGES_VALUES: dict[str, list[Schema]] = {
    "mixed_precision": [_OBJECT, {"type": "string"}],
    "train.exit_signal": [_OBJECT],
    "train.manual_gc_eval": [{"type": "integer"}],
    "model.activation_func": [_OBJECT, {"type": "string", "pattern": _FUNCTION}],
    "model.rope_scaling": [{"type": "boolean"}],
    "optimizer.optimizer": [{"const": "dist_muon"}],
    "optimizer.params_dtype": _WEIGHT_TYPES,
    "optimizer.main_params_dtype": _WEIGHT_TYPES,
    "optimizer.exp_avg_dtype": _WEIGHT_TYPES,
    "optimizer.exp_avg_sq_dtype": _WEIGHT_TYPES,
    "tokenizer.tokenizer_type": [{"enum": ["HuggingFaceTokenizer", "NullTokenizer"]}],
}
"""What Bridge writes as the values of keys that are Onstep's, too (`config.bridge.own_values`)."""
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def json_schema(keys: Mapping[str, Key] = KEYS) -> Schema:
    """The schema (draft 2020-12) of a configuration file: its sections and their keys, and any key by its dotted name.

    Types, choices and bounds of numbers are those of `onstep.config.validate`; what it checks beyond them, such as
    paths and combinations of keys, a schema cannot say. Keys of Megatron Bridge are accepted, as deprecated ones.
    """
    properties: dict[str, Schema] = {}
    patterns: dict[str, Schema] = {}
    for name, schema in {**{key.name: _of_key(key) for key in keys.values()}, **_of_bridge()}.items():
        section, dot, last = name.rpartition(".")
        place = properties.setdefault(section, _section())["properties"] if dot else properties
        place[last] = schema
        if dot:
            patterns[f"^{re.escape(name)}$"] = {"$ref": f"#/properties/{section}/properties/{last}"}
        if "additionalProperties" in schema:  # a dictionary: `env_vars.NAME` sets one entry of it
            patterns[rf"^{re.escape(name)}\."] = {}
    sections = [name for name, schema in properties.items() if "properties" in schema]
    for name in sections:
        properties[name]["type"] = ["object", "null"]
    return {
        "$schema": DIALECT,
        "title": "Onstep configuration",
        "description": "A configuration of `onstep train`, written by `onstep config schema`.",
        **_section(properties),
        "patternProperties": patterns,
        "if": {"not": {"required": [TARGET]}},  # Bridge writes null for a section that is at its defaults
        "then": {"properties": {name: {"type": "object"} for name in sections}},
        "$defs": {"object of Megatron Bridge": {"type": "object", "required": [TARGET], "deprecated": True}},
    }


def _section(properties: dict[str, Schema] | None = None) -> Schema:
    properties = {} if properties is None else properties
    properties[TARGET] = {"type": "string", "description": "A class of Megatron Bridge.", "deprecated": True}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _of_key(key: Key) -> Schema:
    option = key.option
    allowed = [_of_type(key.annotation, option.bound, option.elements)]
    if option.choices:
        allowed = [{"enum": [*option.choices, *([None] if type(None) in members_of(key.annotation) else [])]}]
    others = [*([{"enum": list(option.spellings)}] if option.spellings else []), *_BRIDGES_VALUES.get(key.name, [])]
    allowed += [{**one, "deprecated": True} for one in others]
    described: Schema = {"description": option.help, "default": key.default}
    return described | (allowed[0] if len(allowed) == 1 else {"anyOf": allowed})


def _of_type(annotation: Any, bound: Bound | None = None, elements: tuple[str, ...] = ()) -> Schema:
    """The schema of a type; `elements` are the texts that it may hold, alone or in a list."""
    found = [_of_member(member, bound, elements) for member in members_of(annotation)]
    if any(get_origin(member) is list and get_args(member) == (str,) for member in members_of(annotation)):
        found.append(_text(elements))  # a text where a list of texts is meant is a list of one
    distinct = [one for place, one in enumerate(found) if one not in found[:place]]
    if len(distinct) > 1 and all(list(one) == ["type"] for one in distinct):
        return {"type": [one["type"] for one in distinct]}
    return distinct[0] if len(distinct) == 1 else {"anyOf": distinct}


def _of_member(member: Any, bound: Bound | None, elements: tuple[str, ...]) -> Schema:
    arguments = get_args(member)
    if get_origin(member) is list:
        return {"type": "array", "items": _of_type(arguments[0], bound, elements)}
    if get_origin(member) is dict:
        return {"type": "object", "additionalProperties": _of_type(arguments[1])}
    if member is Any:
        return {}
    if member is str:
        return _text(elements)
    return {"type": _TYPES[member], **(_limits(bound) if bound is not None and member in (int, float) else {})}


def _text(elements: tuple[str, ...]) -> Schema:
    return {"enum": list(elements)} if elements else {"type": "string"}


def _limits(bound: Bound) -> Schema:
    """The limits of a rule: the least and the greatest number in its words, where it does not hold beyond them."""
    numbers = [float(text.replace(",", "")) for text in _NUMBER.findall(bound.text)]
    limits: Schema = {}
    for name, limit, beyond in (("Minimum", min(numbers), -1.0), ("Maximum", max(numbers), 1.0)):
        if not bound.holds(limit + beyond):
            value = int(limit) if limit.is_integer() else limit
            limits[f"{name.lower()}" if bound.holds(limit) else f"exclusive{name}"] = value
    return limits


def _of_bridge() -> dict[str, Schema]:
    """The keys of Megatron Bridge that are not Onstep's, with the values that are accepted."""
    return {name: _of_rule(rule) for name, rule in rules()}


def _of_rule(rule: Rule) -> Schema:
    effect = f"sets {', '.join(rule.becomes)}" if rule.becomes else "has no effect"
    text = f"A key of Megatron Bridge, which {effect}.{f' {rule.why}.' if rule.why else ''}"
    schema: Schema = {"description": text, "deprecated": True}
    plain = [list(one) if isinstance(one, tuple) else one for one in rule.accepts or ()]
    return schema if rule.accepts is None else schema | {"anyOf": [{"enum": plain}, _OBJECT]}
