"""Maps Hugging Face's `fsdp`, `fsdp_config` and `parallelism_config` onto the sections `parallel` and `fsdp`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from onstep.config.sections.parallel import ParallelConfig
from onstep.config.suggestions import nearest, shown
from onstep.errors import ConfigError
from onstep.files.bounded_reading import integer_from_environment, read_json

TRUE, FALSE = ("true", "1", "yes", "y", "on", "t"), ("false", "0", "no", "n", "off", "f", "none", "")
_STRATEGIES = {
    **dict.fromkeys(("full_shard", "1"), (True, False)),
    **dict.fromkeys(("shard_grad_op", "2"), (False, False)),
    **dict.fromkeys(("hybrid_shard", "4"), (True, True)),
    **dict.fromkeys(("hybrid_shard_zero2", "5"), (False, True)),
}
"""Whether weights are freed after the forward pass, and whether each machine has a replica of its own."""
_AXES = {
    "dp_replicate_size": "data_parallel_replicate_size",
    "dp_shard_size": "data_parallel_shard_size",
    "tp_size": "tensor_model_parallel_size",
    "pp_size": "pipeline_model_parallel_size",
}
_SHARD_SIZE = "parallel.data_parallel_shard_size"
_WRITTEN = {
    "fsdp.wrap": "transformer_layer_cls_to_wrap",
    "fsdp.reshard_after_forward": "reshard_after_forward",
    "fsdp.cpu_offload": "cpu_offload",
    "fsdp.prefetch": "forward_prefetch",
}
"""The keys of `fsdp_config` that set those of the section `fsdp`."""
_LATER = {"cp_size": "context", "sp_size": "sequence"}
_WHOLE_PARAMETERS = "version 2 keeps the parameters as the model has them"
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "version": ((2,), "models are sharded by torch's fully_shard, which is version 2"),
    "auto_wrap_policy": (
        ("TRANSFORMER_BASED_WRAP",),
        "blocks are those that the model names, or classes in transformer_layer_cls_to_wrap",
    ),
    "min_num_params": ((0,), "blocks are not found by their size; name their classes in transformer_layer_cls_to_wrap"),
    "state_dict_type": (
        ("FULL_STATE_DICT", "SHARDED_STATE_DICT"),
        "a checkpoint has the shards, which any number of ranks can load, and the first adds the whole weights",
    ),
    "use_orig_params": ((True,), _WHOLE_PARAMETERS),
    "sync_module_states": ((True,), "all ranks begin with the weights of the first"),
    "limit_all_gathers": ((True,), "version 2 always limits them"),
    "backward_prefetch": (("BACKWARD_PRE",), "version 2 gathers the next block while one computes"),
    "ignored_modules": ((None,), "all parameters are sharded"),
    "mixed_precision_policy": ((None,), "pass bf16=True or fp16=True, which decide the types of the shards"),
    "mixed_precision": ((None,), "pass bf16=True or fp16=True, which decide the types of the shards"),
    "xla": ((False,), "there is no XLA"),
    "xla_fsdp_v2": ((False,), "there is no XLA"),
    "xla_fsdp_grad_ckpt": ((False,), "there is no XLA; use activation_checkpointing"),
    "xla_fsdp_settings": ((None, {}), "there is no XLA"),
}
"""Keys of which only some values are possible, with these and the reason."""
_SWITCHES = {
    *("cpu_offload", "offload_params", "activation_checkpointing", "activation_checkpointing_offload"),
    *("cpu_ram_efficient_loading", "forward_prefetch"),
    *(key for key, (values, _) in _REFUSED.items() if all(isinstance(value, bool) for value in values)),
}
_KNOWN = {"reshard_after_forward", "sharding_strategy", "transformer_layer_cls_to_wrap", *_SWITCHES, *_REFUSED}


@dataclass(frozen=True)
class _Given:
    """The keys of `fsdp_config`, without their prefix."""

    values: Mapping[str, Any]

    def switch(self, name: str) -> bool:
        """The value of a switch, False if it is not given."""
        return bool(_switched(name, self.values.get(name, False)))

    def strategy(self) -> tuple[bool | int, bool]:
        """Whether weights are freed after the forward pass, and whether each machine has a replica of its own."""
        frees, is_hybrid = _strategy_of("sharding_strategy", self.values.get("sharding_strategy", "full_shard"))
        given = self.values.get("reshard_after_forward")
        if given is None:
            return frees, is_hybrid
        if isinstance(given, str) and given.lower() in _STRATEGIES and not given.isdigit():
            frees, hybrid_too = _strategy_of("reshard_after_forward", given)
            return frees, is_hybrid or hybrid_too
        if isinstance(given, int) and not isinstance(given, bool):
            return given, is_hybrid
        return bool(_switched("reshard_after_forward", given)), is_hybrid

    def classes(self) -> list[str] | None:
        """The classes of the blocks; None for those that the model names."""
        given = self.values.get("transformer_layer_cls_to_wrap")
        if isinstance(given, str):
            given = [name.strip() for name in given.split(",") if name.strip()]
        if given is not None and not (isinstance(given, list) and all(isinstance(name, str) for name in given)):
            raise ConfigError(f"{_named('transformer_layer_cls_to_wrap', given)} must be names of classes.")
        return given or None


def settle_sharding(args: Any) -> None:
    """Bring the arguments into one form, as transformers does: `fsdp` is True, and the rest is in `fsdp_config`.

    The options of `accelerate launch` fill in what the arguments leave open.

    Raises:
        ConfigError: for a form that is none, such as a file that is not there.
    """
    config = _read(args.fsdp_config)
    if isinstance(args.fsdp, str) and args.fsdp.lower() in TRUE + FALSE:
        args.fsdp = args.fsdp.lower() in TRUE
    if _launched("ACCELERATE_USE_FSDP"):
        args.fsdp = args.fsdp or True
        config = {**_from_environment(), **config}
    if args.parallelism_config is None and _launched("ACCELERATE_USE_PARALLELISM_CONFIG"):
        args.parallelism_config = _sizes_from_environment()
    if not args.fsdp:
        return
    options = args.fsdp.split() if isinstance(args.fsdp, str) else args.fsdp
    for option in () if options is True else _listed(options):
        for key, value in _meaning_of(option).items():
            config.setdefault(key, value)
    config = {**dict.fromkeys(("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt"), False), "min_num_params": 0, **config}
    args.fsdp, args.fsdp_config = True, config
    given = _Given(config)
    if given.switch("activation_checkpointing"):
        args.activation_checkpointing = args.gradient_checkpointing = True
    if given.switch("activation_checkpointing_offload"):
        args.activation_checkpointing_kwargs = {"offload": True, **(args.activation_checkpointing_kwargs or {})}
    if "cpu_ram_efficient_loading" in config:  # transformers' from_pretrained reads it
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = str(given.switch("cpu_ram_efficient_loading")).lower()


def sharding_keys(args: Any) -> dict[str, Any]:
    """The values of the sections `parallel` and `fsdp` that arguments ask for, by dotted key.

    Args:
        args: the arguments, Onstep's or Hugging Face's.

    Raises:
        ConfigError: for a key or value that is not supported, and for arguments that contradict each other.
    """
    sizes = _given_sizes(args.parallelism_config)
    if not args.fsdp:
        if args.fsdp_config:
            raise ConfigError(f"TrainingArguments.fsdp_config={args.fsdp_config!r} requires fsdp=True; set it, too.")
        return {f"parallel.{_AXES[name]}": size for name, size in sizes.items()}
    values = dict(args.fsdp_config or {})
    _check(values)
    given = _Given(values)
    frees, is_hybrid = given.strategy()
    if sizes.get("dp_replicate_size", 1) > 1 and sizes.get("dp_shard_size", 1) == 1:
        raise ConfigError(
            f"TrainingArguments.fsdp=True contradicts parallelism_config: dp_replicate_size="
            f"{sizes['dp_replicate_size']} without dp_shard_size makes replicas only; set dp_shard_size, or drop fsdp."
        )
    if all(sizes.get(name, 1) == 1 for name in _AXES if name != "tp_size"):
        local = integer_from_environment("LOCAL_WORLD_SIZE", 0) if is_hybrid else 0
        sizes = {**sizes, "dp_shard_size": local or -1}
    prefetch = {"fsdp.prefetch": 1} if given.switch("forward_prefetch") else {}
    return {
        **{f"parallel.{_AXES[name]}": size for name, size in sizes.items()},
        "fsdp.wrap": given.classes(),
        "fsdp.reshard_after_forward": frees,
        "fsdp.cpu_offload": given.switch("cpu_offload") or given.switch("offload_params"),
        **prefetch,
    }


def parallel_section(args: Any) -> ParallelConfig | None:
    """The section `parallel` that arguments ask for, also by `config_overrides`; None if they ask for nothing.

    Args:
        args: the arguments.
    """
    keys = sharding_keys(args)
    for name, value in (args.config_overrides or {}).items():
        keys |= {f"parallel.{one}": size for one, size in value.items()} if name == "parallel" else {name: value}
    names = {f"parallel.{one.name}": one.name for one in fields(ParallelConfig)}
    sizes = {names[key]: size for key, size in keys.items() if key in names}
    return ParallelConfig(**sizes) if sizes else None


def written_names(args: Any) -> dict[str, str]:
    """What the keys of the sections `parallel` and `fsdp` are called in the arguments that set them, by dotted key.

    Args:
        args: the arguments.
    """
    names = {f"parallel.{one.name}": f"config_overrides['parallel.{one.name}']" for one in fields(ParallelConfig)}
    if args.parallelism_config:
        names |= {f"parallel.{key}": f"parallelism_config[{name!r}]" for name, key in _AXES.items()}
    elif args.fsdp:
        names[_SHARD_SIZE] = "fsdp"
    if args.fsdp:
        names |= {key: f"fsdp_config[{name!r}]" for key, name in _WRITTEN.items()}
    for name, value in (args.config_overrides or {}).items():
        for key in [f"{name}.{one}" for one in value] if isinstance(value, Mapping) else [name]:
            names[key] = f"config_overrides[{key!r}]"
    return names


def writes_whole_weights(args: Any) -> bool:
    """Whether each checkpoint of a sharded model also has whole weights, as `fsdp_config["state_dict_type"]` says.

    Args:
        args: the arguments.
    """
    kind = (args.fsdp_config or {}).get("state_dict_type") or "FULL_STATE_DICT"
    return bool(args.fsdp) and str(kind).upper() == "FULL_STATE_DICT" and args.parallel_sizes.dp_shard > 1


def plain_parallelism(given: object) -> dict[str, Any] | None:
    """accelerate's `ParallelismConfig`, or a dictionary like it, as a dictionary of what is set."""
    if given is None or isinstance(given, dict):
        return given
    if not is_dataclass(given) or isinstance(given, type) or not hasattr(given, "dp_shard_size"):
        raise ConfigError(
            f"TrainingArguments.parallelism_config must be accelerate's ParallelismConfig or a dictionary of its "
            f"fields, got {shown(given)}."
        )
    names = (*_AXES, *_LATER)
    return {name: size for name in names if (size := getattr(given, name, 1)) not in (None, 1)}


def _given_sizes(given: object) -> dict[str, int]:
    """The sizes of the axes of `parallelism_config`; none if they are all 1."""
    values = plain_parallelism(given) or {}
    for name, size in values.items():
        rule = f"TrainingArguments.parallelism_config: {name}={shown(size)}"
        if name in _LATER and size not in (None, 1):
            raise ConfigError(f"{rule} must be 1: {_LATER[name]} parallelism comes with a later version.")
        is_whole = isinstance(size, int) and not isinstance(size, bool)
        if name in ("tp_size", "pp_size") and size is not None and not (is_whole and size >= 1):
            raise ConfigError(f"{rule} must be a number of ranks.")
        if name in _AXES and size is not None and not (is_whole and (size >= 1 or size == -1)):
            raise ConfigError(f"{rule} must be a number of ranks, or -1 for the rest.")
        if name not in (*_AXES, *_LATER) and not (name.endswith(("_backend", "_handler")) or name == "device_mesh"):
            raise ConfigError(f"{rule}: there is no such field.{nearest(name, [*_AXES, *_LATER])}")
    sizes = {name: values.get(name) or 1 for name in _AXES}
    return sizes if any(size != 1 for size in sizes.values()) else {}


def _read(config: object) -> dict[str, Any]:
    """The keys of `fsdp_config`, without the prefix that they may have, from a dictionary or a JSON file.

    Raises:
        ConfigError: for a file that cannot be read, and anything else.
    """
    rule = f"TrainingArguments.fsdp_config must be a dictionary or a JSON file with one, got {shown(config)}"
    if isinstance(config, (str, os.PathLike)):
        try:
            config = read_json(os.fspath(config), error=ConfigError)
        except OSError as error:
            raise ConfigError(f"{rule}: {error.strerror}.") from error
    if config is not None and not isinstance(config, dict):
        raise ConfigError(f"{rule}.")
    return {name.removeprefix("fsdp_"): value for name, value in (config or {}).items()}


def _check(values: Mapping[str, Any]) -> None:
    """Refuse (ConfigError) keys and values that have no effect here, by name."""
    for name, value in values.items():
        if name not in _KNOWN:
            raise ConfigError(f"{_named(name, value)} is not a key of fsdp_config.{nearest(name, sorted(_KNOWN))}")
        if name in _SWITCHES:
            value = _switched(name, value)
        if name not in _REFUSED:
            continue
        allowed, reason = _REFUSED[name]
        is_number = isinstance(value, str) and value.isdigit()
        value = int(value) if is_number else value.upper() if isinstance(value, str) else value
        if value not in (*allowed, None):
            rule = " or ".join(map(repr, allowed))
            raise ConfigError(f"{_named(name, values[name])} must be {rule}: {reason}; drop the key, or set it so.")


def _named(name: str, value: object) -> str:
    return f"TrainingArguments.fsdp_config[{name!r}]={shown(value)}"


def _switched(name: str, value: object) -> bool | None:
    """A switch, which may be a text as in YAML."""
    if isinstance(value, str) and value.lower() in TRUE + FALSE:
        return value.lower() in TRUE
    if value is None or isinstance(value, bool):
        return value
    raise ConfigError(f"{_named(name, value)} must be true or false.")


def _strategy_of(name: str, value: object) -> tuple[bool, bool]:
    found = _STRATEGIES.get(str(value).lower())
    if found is None:
        known = ", ".join(one for one in _STRATEGIES if not one.isdigit())
        raise ConfigError(f"{_named(name, value)} must be one of {known}; without shards: drop fsdp.")
    return found


def _listed(options: object) -> list[str]:
    if not isinstance(options, (list, tuple)):
        raise ConfigError(f"TrainingArguments.fsdp must be True, options or a list of them, got {shown(options)}.")
    return [str(one) for one in options]


def _meaning_of(option: str) -> dict[str, Any]:
    """The keys of `fsdp_config` that an option of `fsdp` sets."""
    name = option.lower()
    if name == "auto_wrap":
        return {}
    if name == "offload":
        return {"cpu_offload": True}
    if name in _STRATEGIES and not name.isdigit():
        frees, is_hybrid = _STRATEGIES[name]
        return {"reshard_after_forward": frees} | ({"sharding_strategy": name} if is_hybrid else {})
    known = ", ".join((*(one for one in _STRATEGIES if not one.isdigit()), "offload", "auto_wrap"))
    raise ConfigError(f"TrainingArguments.fsdp: {option!r} must be one of {known}; without shards: drop fsdp.")


def _launched(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in TRUE


_VARIABLES = {
    "FSDP_OFFLOAD_PARAMS": "cpu_offload",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "transformer_layer_cls_to_wrap",
}
"""Variables of accelerate whose key has another name."""


def _from_environment() -> dict[str, Any]:
    """What `accelerate launch --use_fsdp` asks for, as keys of `fsdp_config`.

    Source: `FullyShardedDataParallelPlugin.__post_init__` of accelerate 1.15.
    """
    found: dict[str, Any] = {"version": os.environ.get("FSDP_VERSION", "1")}
    for variable, value in os.environ.items():
        name = _VARIABLES.get(variable, variable.removeprefix("FSDP_").lower())
        if variable.startswith("FSDP_") and name in _KNOWN and value:
            found[name] = value
    found.pop("min_num_params", None)  # the launcher sets it for every policy
    return found


def _sizes_from_environment() -> dict[str, int]:
    """What `accelerate launch --use_parallelism_config` asks for."""
    return {name: integer_from_environment(f"PARALLELISM_CONFIG_{name.upper()}", 1) for name in (*_AXES, *_LATER)}
