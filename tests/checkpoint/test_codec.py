"""The codec gives back what it was given, to the bit, and refuses by path what it has no form for."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import math
import pathlib
import random
import struct
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from onstep.checkpoint.format.codec import check_encodable, document_to_bytes, encode_state
from onstep.checkpoint.format.decoding import decode_state, document_from_bytes
from onstep.errors import CheckpointError, UnsupportedStateError


def through_files(state: Any) -> Any:
    """What comes back after the tensors were copied and the document was a file."""
    tensors, document = encode_state(state)
    text = document_to_bytes(document)
    return decode_state({name: tensor.clone() for name, tensor in tensors.items()}, document_from_bytes(text))


def bits(value: Any) -> Any:
    """Something that is equal only for values of equal types and bits."""
    if isinstance(value, Tensor):
        raw = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        return "tensor", value.dtype, tuple(value.shape), bytes(raw.numpy())
    if isinstance(value, np.ndarray | np.generic):
        return type(value), value.dtype.str, np.shape(value), np.asarray(value).tobytes()
    if isinstance(value, float):
        return type(value), struct.pack(">d", value)
    if isinstance(value, complex):
        return type(value), struct.pack(">dd", value.real, value.imag)
    if isinstance(value, dict):
        extra = (getattr(value, "default_factory", None), bits(getattr(value, "_metadata", None)))
        return type(value), extra, [(bits(key), bits(item)) for key, item in value.items()]
    if isinstance(value, set | frozenset):
        return type(value), sorted(map(repr, map(bits, value)))
    if isinstance(value, collections.deque):
        return type(value), value.maxlen, [bits(item) for item in value]
    if type(value) in (list, tuple):
        return type(value), [bits(item) for item in value]
    return type(value), value


def assert_exact(state: Any) -> None:
    assert bits(through_files(state)) == bits(state)


NAN_WITH_PAYLOAD = struct.unpack(">d", bytes.fromhex("fff8000000abcdef"))[0]

VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -(2**53),
    2**53 + 1,
    -(2**64) - 1,
    3**5000,
    0.1,
    -0.0,
    5e-324,
    1.7976931348623157e308,
    math.inf,
    -math.inf,
    math.nan,
    NAN_WITH_PAYLOAD,
    complex(-0.0, math.nan),
    "",
    "naïve \U0001f600\x00\u2028",
    "\ud83d\ude00 as two surrogates, which JSON would join",
    "\ud800 alone",
    b"",
    bytes(range(256)),
    [],
    [1, [2.5, "a"], [None]],
    (),
    (1,),
    [(1, 2), [1, 2]],
    {1, "1", 1.5, (1, frozenset({2}))},
    frozenset({b"a", None}),
    collections.deque([1, 2], maxlen=5),
    collections.deque(),
    {},
    {"b": 1, "a": 2},
    {0: "int", "0": "text", None: 1, 2.5: 2, (1, "x"): 3, math.nan: 4, b"k": 5, "\ud800": 6},
    {"dict": {"tensor": "a text, no tensor"}, "onstep_state": 1},
    collections.OrderedDict([("z", 1), ("a", 2)]),
    collections.Counter("hello"),
    collections.defaultdict(list, {"a": [1]}),
    collections.defaultdict(None, {3: 4}),
    torch.Size([2, 0, 3]),
    torch.bfloat16,
    torch.complex128,
    torch.device("cuda:3"),
    torch.device("cpu"),
    pathlib.Path("/a/b c"),
    pathlib.Path("odd\udc80name"),
    pathlib.PurePosixPath("x/../y"),
    pathlib.PureWindowsPath(r"C:\x"),
    datetime.datetime(2025, 2, 28, 23, 59, 59, 999_999),
    datetime.datetime(2025, 2, 28, tzinfo=datetime.UTC),
    datetime.date(1, 1, 1),
    datetime.timedelta(days=-1, seconds=5, microseconds=7),
    np.float32(0.1),
    np.float64("nan"),
    np.bool_(True),
    np.int8(-3),
    np.uint64(2**64 - 1),
    np.complex64(1 - 2j),
    np.str_("text"),
    np.datetime64("2025-01-01T00:00", "m"),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_comes_back_to_the_bit(value: Any) -> None:
    assert_exact(value)
    assert_exact({"inside": [value, (value,)]})


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=">i4").reshape(3, 4)[:, ::-2],
        np.array([[1, np.nan], [-0.0, np.inf]], dtype="f2"),
        np.array(7, dtype="u2"),
        np.zeros((0, 3), dtype="f8"),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array([True, False]),
        np.array(["a", "büß", ""]),
        np.array([b"a", b"xyz"]),
        np.array(["2025-01-01", "NaT"], dtype="datetime64[D]"),
        np.broadcast_to(np.float32(3), (4, 2)),
        np.frombuffer(b"read-only memory", dtype="u2"),
    ],
    ids=lambda array: f"{array.dtype}-{array.shape}",
)
def test_an_array_comes_back_to_the_bit_and_can_be_written_to(array: Any) -> None:
    back = through_files({"a": array})["a"]
    assert bits(back) == bits(array)
    assert back.flags.writeable


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(12)[::5],
        torch.tensor(3.5, dtype=torch.bfloat16),
        torch.empty(0, 4),
        torch.tensor([True, False]),
        torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([math.nan, -0.0, math.inf]),
        torch.zeros(1).expand(3, 2),
        torch.tensor([2**63 + 5], dtype=torch.uint64),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}",
)
def test_a_tensor_comes_back_to_the_bit(tensor: Tensor) -> None:
    assert_exact({"t": tensor})


def test_a_parameter_comes_back_as_a_plain_tensor() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    back = through_files(parameter)
    assert type(back) is Tensor
    assert not back.requires_grad
    assert torch.equal(back, torch.ones(2))


def random_state(generator: random.Random, depth: int = 0) -> Any:
    """A state of random shape, from all kinds of values and containers."""
    pick = generator.randrange(9 if depth < 5 else 3)
    if pick == 0:
        return generator.choice(VALUES)
    if pick == 1:
        return struct.unpack(">d", generator.randbytes(8))[0] if generator.random() < 0.5 else generator.getrandbits(90)
    if pick == 2:
        shape = [generator.randrange(4) for _ in range(generator.randrange(3))]
        return torch.randint(0, 255, shape, dtype=generator.choice([torch.uint8, torch.int64, torch.float32]))
    children = [random_state(generator, depth + 1) for _ in range(generator.randrange(5))]
    if pick == 3:
        return tuple(children)
    if pick == 4:
        return collections.deque(children)
    if pick == 5:
        return {generator.choice([index, str(index), (index, 0.5)]): child for index, child in enumerate(children)}
    if pick == 6:
        return {generator.choice(["a", "b.c", "a.b", "c"]) + str(index): child for index, child in enumerate(children)}
    return children


@pytest.mark.parametrize("seed", range(60))
def test_random_states_come_back_exactly(seed: int) -> None:
    torch.manual_seed(seed)
    assert_exact(random_state(random.Random(seed)))


def trained(optimizer_class: Any, **options: Any) -> tuple[torch.nn.Module, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    optimizer = optimizer_class(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters()}], lr=0.01, **options
    )
    for _ in range(2):
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"amsgrad": True, "fused": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
    ],
)
def test_states_of_model_optimizer_and_scheduler_come_back_exactly(optimizer_class: Any, options: Any) -> None:
    model, optimizer = trained(optimizer_class, **options)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[3])
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    back = through_files(state)
    assert bits(back) == bits(state)
    assert back["model"]._metadata[""] == {"version": 1}
    fresh_model, fresh_optimizer = trained(optimizer_class, **options)
    fresh_model.load_state_dict(back["model"])
    fresh_optimizer.load_state_dict(back["optimizer"])
    assert bits(fresh_optimizer.state_dict()) == bits(optimizer.state_dict())


def test_states_of_generators_come_back_exactly() -> None:
    numpy = np.random.default_rng(3).bit_generator.state
    state = [random.getstate(), np.random.get_state(), torch.get_rng_state(), numpy]
    back = through_files(state)
    assert bits(back) == bits(state)
    random.setstate(back[0])
    np.random.set_state(back[1])
    torch.set_rng_state(back[2])


def test_tensors_of_a_model_keep_the_names_of_its_parameters() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    tensors, _ = encode_state(model.state_dict())
    assert list(tensors) == ["0.weight", "0.bias"]


def test_names_of_tensors_stay_unique_and_valid_text() -> None:
    state = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}, "__metadata__": torch.ones(2), "\ud800": torch.ones(3)}
    state |= {"x" * 2000: torch.ones(4)}
    tensors, _ = encode_state(state)
    assert len(tensors) == 5
    assert "__metadata__" not in tensors
    assert all(name.encode() and len(name) < 600 for name in tensors)
    assert_exact(state)


def test_a_tensor_met_twice_is_stored_once_and_comes_back_as_one() -> None:
    weight = torch.nn.Parameter(torch.randn(3, 2))
    state = {"embed": weight, "head": weight.detach(), "again": [weight.view(3, 2)]}
    tensors, _ = encode_state(state)
    assert list(tensors) == ["embed"]
    back = through_files(state)
    assert back["embed"] is back["head"]
    assert back["again"][0] is back["head"]


def test_an_array_met_twice_comes_back_as_one() -> None:
    array = np.arange(3)
    first, second = through_files([array, array])
    assert first is second


def test_different_views_of_one_memory_come_back_as_tensors_of_their_own() -> None:
    base = torch.arange(6.0)
    state = [base, base.reshape(2, 3), base[:3], base[::2], base.view(torch.int32), torch.zeros(0), torch.zeros(0)]
    back = through_files(state)
    assert bits(back) == bits(state)
    pointers = {tensor.data_ptr() for tensor in back[:5]}
    assert len(pointers) == 5
    assert back[5] is not back[6]


def test_equal_sets_give_equal_documents() -> None:
    collide = [0, 2**61 - 1, 2 * (2**61 - 1)]  # one hash, so the order of insertion shows
    backwards = list(reversed(collide))
    first, second = set(collide), set(backwards)
    assert list(first) != list(second)
    assert encode_state(first)[1] == encode_state(second)[1]


class Colour(enum.StrEnum):
    RED = "red"


class Pair(NamedTuple):
    first: int


@dataclasses.dataclass
class Record:
    loss: float


class Opaque:
    pass


def itself() -> list[Any]:
    ring: list[Any] = []
    ring.append(ring)
    return ring


REFUSED = [
    (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear", "save its state_dict()"),
    (lambda: 0, "function", "save a name for it"),
    (Record, "type", "save a name for it"),
    (Colour.RED, "Colour", "save its .value"),
    (Pair(1), "Pair", "save its _asdict()"),
    (Record(0.5), "Record", "save dataclasses.asdict(it)"),
    (Opaque(), "Opaque", "keep it out of the state"),
    (type("Text", (str,), {})("x"), "Text", "save str(it)"),
    (type("Map", (dict,), {})(), "Map", "save dict(it)"),
    (bytearray(b"x"), "bytearray", "bytes(it)"),
    (range(3), "range", "save list(it)"),
    (torch.Generator(), "torch._C.Generator", "save its get_state()"),
    (random.Random(1), "random.Random", "save its getstate()"),
    (np.random.default_rng(), "numpy.random._generator.Generator", "bit_generator.state"),
    (np.array([Opaque()]), "numpy.ndarray", "plain items"),
    (np.zeros(2, dtype=[("a", "i4")]), "numpy.ndarray", "plain items"),
    (np.longdouble(1), "numpy.longdouble", "convert it"),
    (torch.eye(2).to_sparse(), "torch.Tensor", "to_dense()"),
    (torch.ones(2, device="meta"), "torch.Tensor", "materialize"),
    (torch.ones(2, dtype=torch.complex128), "torch.Tensor", "view_as_real"),
    (collections.defaultdict(lambda: 0), "defaultdict", "convert it with dict(...)"),
    (1 << 2_000_000, "integer of 2000001 bits", "save it as bytes"),
    (itself(), "levels deep", "flatten it"),
    (datetime.datetime(2025, 10, 26, 2, 30, fold=1), "exactly", "fixed offset"),
    ({(1, Colour.RED): 1}, "as a key or in a set", ""),
    ({Opaque()}, "as a key or in a set", "keep it out"),
]


@pytest.mark.parametrize(("value", "what", "remedy"), REFUSED, ids=[what for _, what, _ in REFUSED])
def test_what_has_no_form_is_refused_by_path_type_and_remedy(value: Any, what: str, remedy: str) -> None:
    state = {"MyCallback": {"history": [1, value]}}
    with pytest.raises(UnsupportedStateError) as refusal:
        check_encodable(state, "callbacks")
    message = str(refusal.value)
    assert message.startswith("callbacks.MyCallback.history.1")
    assert what in message
    assert remedy in message


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantised_tensor_is_refused() -> None:
    with pytest.raises(UnsupportedStateError, match=r"state\.q: .* save its int_repr\(\)"):
        encode_state({"q": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)})


def test_a_tensor_whose_memory_was_freed_is_refused() -> None:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedStateError, match=r"state\.w: the memory of this tensor has been freed"):
        encode_state({"w": tensor})


@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: (x,), lambda x: {1: x}, lambda x: frozenset({x})])
def test_any_depth_is_refused_or_comes_back(wrap: Any) -> None:
    state: Any = "leaf"
    exact = 0
    for _ in range(80):
        state = wrap(state)
        try:
            tensors, document = encode_state(state)
        except UnsupportedStateError:
            continue
        assert decode_state(tensors, document) == state
        exact += 1
    assert 60 <= exact <= 66


def document_of(node: Any) -> dict[str, Any]:
    return {"onstep_state": 1, "state": node}


def nested(kind: str, levels: int) -> Any:
    node: Any = 1
    for _ in range(levels):
        node = [node] if kind == "list" else {kind: [node]}
    return node


MALFORMED: list[Any] = [
    [],
    None,
    {"state": 1},
    {"onstep_state": 2, "state": 1},
    {"onstep_state": True, "state": 1},
    {"onstep_state": 1, "state": 1, "more": 1},
    *map(
        document_of,
        [
            {},
            {"tuple": [], "list": []},
            {"object": "os.system"},
            {"torch.nn.Linear": [1, 1]},
            {"__reduce__": ["os.system", "true"]},
            {"tuple": 3},
            {"tuple": {"a": 1}},
            {"set": [[1]]},
            {"set": [1, 1]},
            {"frozenset": [{"tensor": "t"}]},
            {"dict": 1},
            {"dict": [[1]]},
            {"dict": [[1, 2], [1, 3]]},
            {"dict": [[{"dict": {}}, 2]]},
            {"dict": [["a", 2], [{"tuple": [{"tensor": "t"}]}, 3]]},
            {"Counter": [1]},
            {"OrderedDict": [1]},
            {"state_dict": {"items": {}}},
            {"defaultdict": {"factory": "eval", "items": {}}},
            {"defaultdict": {"factory": ["list"], "items": {}}},
            {"defaultdict": {"factory": None}},
            {"deque": {"maxlen": 1, "items": [1, 2]}},
            {"deque": {"maxlen": -1, "items": []}},
            {"deque": {"maxlen": 2**70, "items": []}},
            {"deque": {"maxlen": "2", "items": []}},
            {"int": 3},
            {"int": "12"},
            {"int": "0x"},
            {"int": "0x" + "f" * 300_000},
            {"float": "nan"},
            {"float": 1.0},
            {"complex": [1.0]},
            {"complex": [1, 2]},
            {"complex": [1.0, math.inf]},
            {"bytes": "!"},
            {"bytes": "é"},
            {"bytes": [1]},
            {"surrogates": "/w=="},
            {"torch.Size": [1.0]},
            {"torch.Size": [2**64]},
            {"torch.dtype": "load"},
            {"torch.dtype": [["x"]]},
            {"torch.device": "cuda:0; x"},
            {"torch.device": "warp"},
            {"path": 3},
            {"path": {"surrogates": "!"}},
            {"datetime": "yesterday"},
            {"date": "2025-02-30"},
            {"timedelta": [10**12, 0, 0]},
            {"timedelta": [1, 2]},
            {"numpy_scalar": ["O", ""]},
            {"numpy_scalar": ["<f4", "AAA="]},
            {"numpy_scalar": ["|b1", "Ag=="]},
            {"numpy_scalar": ["<U1", "//////8="]},
            {"numpy_scalar": ["<M8[parsec]", "AAAAAAAAAAA="]},
            {"tensor": "missing"},
            {"tensor": ["t"]},
            {"tensor": None},
            {"ndarray": {"dtype": "|O", "shape": [4], "tensor": "t"}},
            {"ndarray": {"dtype": "|u1", "shape": [4.0], "tensor": "t"}},
            {"ndarray": {"dtype": "|u1", "shape": [-4], "tensor": "t"}},
            {"ndarray": {"dtype": "|u1", "shape": [5], "tensor": "t"}},
            {"ndarray": {"dtype": "<f8", "shape": [2**30, 2**30], "tensor": "t"}},
            {"ndarray": {"dtype": "|u1", "shape": [0, 2**30, 2**30, 2**30], "tensor": "empty"}},
            {"ndarray": {"dtype": "|b1", "shape": [4], "tensor": "t"}},
            {"ndarray": {"dtype": "|u1", "shape": [1], "tensor": "wide"}},
            [{"tensor": "t"}, math.nan],
            [{"tensor": "t"}, 2**60],
            [{"tensor": "t"}, object()],
            nested("list", 500),
            nested("tuple", 200),
            nested("frozenset", 100),
            {"dict": [[nested("tuple", 300), 1]]},
            {"torch.dtype": nested("list", 400)},
        ],
    ),
]


@pytest.mark.parametrize("document", MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_document_is_refused(document: Any) -> None:
    tensors = {"t": torch.tensor([1, 2, 3, 4], dtype=torch.uint8), "wide": torch.zeros(1)}
    tensors["empty"] = torch.zeros(0, dtype=torch.uint8)
    if isinstance(document, dict) and document.keys() == {"onstep_state", "state"}:
        # All tensors are named, so what is malformed is the only thing to refuse.
        document = {**document, "state": [document["state"], *({"tensor": name} for name in tensors)]}
    with pytest.raises(CheckpointError, match=r"^optimizer"):
        decode_state(tensors, document, "optimizer")


def test_a_tensor_that_the_document_does_not_name_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="its document does not mention 1 tensors, first 'extra'"):
        decode_state({"extra": torch.zeros(1)}, document_of(1))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"\x80\x04\x95.",
        b"[" * 100_000,
        b'{"a": 1, "a": 2}',
        b"NaN",
        b"-Infinity",
        b"1" * 5000,
        b"[" + b"9" * 30 + b"]",
    ],
    ids=lambda text: str(text[:10]),
)
def test_bytes_that_are_no_strict_json_are_refused(text: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"rng/rank_0\.json is not valid JSON"):
        document_from_bytes(text, "rng/rank_0.json")


def damaged(node: Any, generator: random.Random) -> Any:
    """The same tree with one random node replaced, renamed or dropped."""
    if generator.random() < 0.15 or not isinstance(node, dict | list) or not node:
        return generator.choice(
            [None, -1, "tuple", [], {}, {"tensor": "x"}, {"int": "0xf"}, 1e400, [[1]], {"set": [[]]}]
        )
    if isinstance(node, list):
        at = generator.randrange(len(node))
        return [*node[:at], damaged(node[at], generator), *node[at + 1 :]]
    key = generator.choice(list(node))
    if generator.random() < 0.2:
        return {("dict" if name == key else name): item for name, item in node.items()}
    return {**node, key: damaged(node[key], generator)}


def test_a_damaged_document_is_read_or_refused_and_nothing_else() -> None:
    state = [VALUES, {"array": np.arange(3), "tensors": [torch.ones(2)], 3: collections.deque([1])}]
    tensors, document = encode_state(state)
    generator = random.Random(0)
    refused = 0
    for _ in range(400):
        try:
            decode_state(tensors, damaged(document, generator))
        except CheckpointError:
            refused += 1
    assert refused > 200


def test_more_values_than_can_be_read_again_are_refused_when_they_are_saved() -> None:
    with pytest.raises(UnsupportedStateError, match=r"10,000,001 non-tensor values .* at most 10,000,000 "):
        document_to_bytes([0] * 10_000_001)


@pytest.mark.slow
def test_almost_as_many_values_as_can_be_read_are_saved() -> None:
    assert document_from_bytes(document_to_bytes([0] * 9_000_000)) == [0] * 9_000_000
