"""Which callables are accepted, and what each of them is handed."""

from __future__ import annotations

import functools
import itertools
from unittest import mock

import pytest
import torch

from onstep.errors import CallbackError
from onstep.events import Callback, CallbackContext, CallbackManager, Control, TrainerCallback, TrainerControl

CONTEXT = {
    "fn(context)": "lambda context: got.append(context)",
    "any one name": "lambda anything: got.append(anything)",
    "default": "lambda context=None: got.append(context)",
    "further defaults": "lambda context, verbose=True: got.append(context)",
    "keyword-only default": "lambda context, *, verbose=True: got.append(context)",
    "context and kwargs": "lambda context, **kwargs: got.append(context)",
    "default context and kwargs": "lambda ctx=None, **kwargs: got.append(ctx)",
    "positional only": "lambda context, /: got.append(context)",
    "star": "lambda *everything: got.append(everything[0])",
    "star and kwargs": "lambda *everything, **kwargs: got.append(everything[0])",
    "context and star": "lambda context, *rest: got.append(context)",
    "one HF name alone": "lambda state: got.append(state)",
}

NO_OP = {
    "fn()": "lambda: got.append('told')",
    "keyword-only default": "lambda *, word='told': got.append(word)",
}

HF = {
    "all three": "lambda args, state, control, **kwargs: got.append((args, state, control, kwargs['model']))",
    "all three, other order": "lambda control, state, args, **kw: got.append((args, state, control, kw['model']))",
    "no kwargs": "lambda args, state, control, model: got.append((args, state, control, model))",
    "keyword only": "lambda *, args, state, control, model: got.append((args, state, control, model))",
    "kwargs alone": "lambda **kw: got.append((kw['args'], kw['state'], kw['control'], kw['model']))",
    "own names": "lambda a, s, c, **kw: got.append((a, s, c, kw['model']))",
    "own names, one more": "lambda a, s, c, model, **kw: got.append((a, s, c, model))",
    "own names, positional only": "lambda a, s, c, /, **kw: got.append((a, s, c, kw['model']))",
    "own names, keyword-only": "lambda a, s, c, *, model, **kw: got.append((a, s, c, model))",
}

HF_BY_BASE_CLASS = {
    "star and kwargs": "lambda *leading, **kw: got.append((*leading, kw['model']))",
    "named, star and kwargs": "lambda args, *rest, **kw: got.append((args, *rest, kw['model']))",
    "own names without kwargs": "lambda a, s, c, model: got.append((a, s, c, model))",
    "own names with defaults": "lambda a=0, s=0, c=0, **kw: got.append((a, s, c, kw['model']))",
    "keyword-only control": "lambda *_, args, state, control, **kw: got.append((args, state, control, kw['model']))",
}

REFUSED = {
    "two unknown": "lambda first, second: None",
    "three unknown": "lambda first, second, third: None",
    "context and more": "lambda context, model: None",
    "unknown keyword-only": "lambda context, *, verbose: None",
    "HF and unknown": "lambda args, state, control, verbose, **kwargs: None",
    "keyword-only context": "lambda *, context: None",
    "positional-only further": "lambda a, s, c, model, /, **kwargs: None",
    "unknown keyword-only with kwargs": "lambda *, verbose, **kwargs: None",
}


def made(source, got):
    return eval(source, {"got": got})


@pytest.fixture
def calls(run):
    """Registers, fires and gives the context."""
    run.args = "arguments"

    def go(fn, event="on_step_end", **fields):
        manager = CallbackManager()
        manager.register(event, fn)
        context = CallbackContext(run, ["chunk"], **fields)
        manager.fire(event, context)
        return context

    return go


def hf_values(context):
    return (context.args, mock.ANY, context.control, "chunk")


@pytest.mark.parametrize("source", CONTEXT.values(), ids=CONTEXT)
def test_context_forms_are_handed_the_context(source, calls):
    got = []

    context = calls(made(source, got))

    assert len(got) == 1
    assert got[0] is context


@pytest.mark.parametrize("source", NO_OP.values(), ids=NO_OP)
def test_forms_without_parameters_are_just_called(source, calls):
    got = []

    calls(made(source, got))

    assert got == ["told"]


@pytest.mark.parametrize("source", HF.values(), ids=HF)
def test_hugging_face_forms_are_known_by_their_signature(source, calls):
    got = []

    context = calls(made(source, got))

    assert got == [hf_values(context)]
    assert got[0][1].global_step == 0


@pytest.mark.parametrize("source", [*HF.values(), *HF_BY_BASE_CLASS.values()], ids=[*HF, *HF_BY_BASE_CLASS])
def test_hugging_face_forms_in_a_hugging_face_class(source, run):
    got = []
    manager = CallbackManager()
    callback = TrainerCallback()
    callback.on_step_end = made(source, got)
    manager.add(callback)
    context = CallbackContext(run, ["chunk"])

    manager.fire("on_step_end", context)

    assert got == [hf_values(context)]


@pytest.mark.parametrize("source", REFUSED.values(), ids=REFUSED)
def test_what_fits_no_convention_is_refused_at_registration_with_the_accepted_forms(source):
    manager = CallbackManager()

    with pytest.raises(TypeError, match=r"cannot handle 'on_log'.*Accepted: fn\(context\), fn\(\) or.*\*\*kwargs"):
        manager.register("on_log", made(source, []))

    assert not manager.has_callbacks("on_log")


def test_every_small_signature_is_either_refused_or_can_be_called(run):
    """Whatever registration lets through must survive the call."""
    names = ("args", "state", "control", "logs", "context", "other")
    shapes = [
        ", ".join(parts)
        for count in range(4)
        for chosen in itertools.permutations(names, count)
        for defaults in itertools.product(("", "=None"), repeat=count)
        for tail in ((), ("*rest",), ("**kwargs",), ("*rest", "**kwargs"))
        for star in range(count + 1)
        for parts in [assembled(chosen, defaults, tail, star)]
        if parts is not None
    ]
    accepted = refused = 0
    for shape in shapes:
        got = []
        fn = eval(f"lambda {shape}: got.append(1)", {"got": got})
        manager = CallbackManager()
        try:
            manager.register("on_log", fn)
        except TypeError:
            refused += 1
            continue
        manager.fire("on_log", CallbackContext(run, ["chunk"], logs={}))
        assert got == [1], shape
        accepted += 1
    assert accepted > 100
    assert refused > 100


def assembled(chosen, defaults, tail, star):
    """Parameters with the last ones keyword-only from `star` on; None for what Python itself refuses."""
    words = [name + default for name, default in zip(chosen, defaults, strict=True)]
    positional, keyword_only = words[:star], words[star:]
    seen_default = False
    for word in positional:
        if seen_default and "=" not in word:
            return None
        seen_default = seen_default or "=" in word
    middle = ["*rest"] if "*rest" in tail else (["*"] if keyword_only else [])
    return [*positional, *middle, *keyword_only, *(["**kwargs"] if "**kwargs" in tail else [])]


@pytest.mark.parametrize(
    ("fn", "kind"),
    [
        pytest.param(lambda: None, None, id="plain"),
        pytest.param("async def fn(context): pass", "async", id="coroutine"),
        pytest.param("async def fn(context): yield 1", "async", id="async generator"),
        pytest.param("def fn(context): yield 1", "a generator", id="generator"),
        pytest.param("class Fn:\n  async def __call__(self, context): pass\nfn = Fn()", "async", id="async object"),
        pytest.param(
            "import functools\nasync def f(n, context): pass\nfn = functools.partial(f, 1)", "async", id="async partial"
        ),
    ],
)
def test_what_would_never_run_is_refused(fn, kind):
    manager = CallbackManager()
    if kind is None:
        manager.register("on_log", fn)
        return
    space = {}
    exec(fn, space)

    with pytest.raises(TypeError, match=f"is {kind} and would never run"):
        manager.register("on_log", space["fn"])


def test_an_async_method_is_refused():
    class Async(Callback):
        async def on_log(self, context): ...

    with pytest.raises(TypeError, match=r"Async\.on_log for 'on_log' is async"):
        CallbackManager().add(Async())


@pytest.mark.parametrize("fn", [None, 3, "print", ["on_log"]])
def test_what_cannot_be_called_is_refused(fn):
    with pytest.raises(TypeError, match="must be callable"):
        CallbackManager().register("on_log", fn)


def test_a_mock_is_handed_the_context(calls):
    for fn in (mock.Mock(), mock.MagicMock()):
        context = calls(fn)

        fn.assert_called_once_with(context)
        assert context.control.vector() == [0] * 7


def test_builtin_methods_are_handed_the_context(calls):
    seen, known = [], set()

    assert seen == [calls(seen.append)]
    calls(known.discard)


def test_a_builtin_without_a_signature_is_handed_the_context(calls):
    words = {"kept": 1}
    with pytest.raises(TypeError, match="CallbackContext"):
        calls(words.update)
    assert words == {"kept": 1}


def test_partials_static_methods_class_methods_and_callable_objects(calls):
    got = []

    class Object:
        def __call__(self, context):
            got.append(("object", context))

        @staticmethod
        def static(context):
            got.append(("static", context))

        @classmethod
        def of_class(cls, context):
            got.append((cls, context))

    def named(label, context):
        got.append((label, context))

    for fn, label in [
        (Object(), "object"),
        (Object.static, "static"),
        (Object.of_class, Object),
        (functools.partial(named, "partial"), "partial"),
    ]:
        context = calls(fn)
        assert got.pop() == (label, context)


def test_a_partial_that_fills_in_hugging_face_keywords(calls):
    got = []
    fn = functools.partial(lambda prefix, state, control, **kwargs: got.append((prefix, control)), "p")

    context = calls(fn)

    assert got == [("p", context.control)]


def test_a_decorator_that_passes_everything_on_keeps_the_convention(calls):
    got = []

    def decorated(fn):
        @functools.wraps(fn)
        def wrapper(*args, **kwargs):
            return fn(*args, **kwargs)

        return wrapper

    context = calls(decorated(lambda context: got.append(context)))
    assert got == [context]
    context = calls(decorated(lambda args, state, control, **kwargs: got.append(control)))
    assert got[1] is context.control


def test_methods_under_a_torch_decorator_keep_their_convention(run):
    class Measures(Callback):
        @torch.no_grad()
        def on_log(self, context):
            self.on_log_got = (context.logs, torch.is_grad_enabled())

        @torch.no_grad()
        def on_step_end(self, args, state, control, **kwargs):
            control.should_save = True

    measures, manager = Measures(), CallbackManager()
    manager.add(measures)
    context = CallbackContext(run, ["chunk"], logs={"loss": 1.0})
    manager.fire("on_log", context)
    manager.fire("on_step_end", context)

    assert measures.on_log_got == ({"loss": 1.0}, False)
    assert context.control.should_save is True


def test_a_decorator_with_a_form_of_its_own_is_called_in_that_form(calls):
    got = []

    @functools.wraps(lambda args, state, control, **kwargs: None)
    def wrapper(context):
        got.append(context)

    assert got == [calls(wrapper)]


def test_optional_keywords_that_the_event_lacks_keep_their_default(calls):
    got = []

    calls(lambda state, control, logs="default", verbose=True: got.append((logs, verbose)))
    calls(lambda state, logs="default", verbose=True, **kwargs: got.append((logs, verbose)))

    assert got == [("default", True)] * 2


def test_demanded_keywords_that_the_event_lacks_are_none(calls):
    got = []

    calls(lambda state, logs, metrics: got.append((logs, metrics)))
    calls(lambda a, s, c, logs, **kwargs: got.append((logs, kwargs.get("metrics"))))

    assert got == [(None, None)] * 2


def test_keywords_of_the_event_are_handed_over(calls):
    got = {}

    calls(lambda **kwargs: got.update(kwargs), "on_log", logs={"loss": 1.0})
    assert got["logs"] == {"loss": 1.0}
    calls(lambda **kwargs: got.update(kwargs), "on_train_metrics", loss=1, grad_norm=2, tokens=3)
    assert (got["loss"], got["grad_norm"], got["tokens"]) == (1, 2, 3)
    calls(lambda metrics, **kwargs: got.update(kwargs, metrics=metrics), "on_eval_end", metrics={"eval_loss": 2.0})
    assert got["metrics"] == {"eval_loss": 2.0}


def test_the_old_name_of_the_processing_class_is_handed_to_who_asks_for_it(calls):
    got = []

    calls(lambda state, tokenizer, **kwargs: got.append(tokenizer), processing_class="bpe")
    calls(lambda **kwargs: got.append(kwargs["tokenizer"]), processing_class="bpe")

    assert got == ["bpe"] * 2


def test_return_values_of_context_handlers_mean_nothing(calls):
    context = calls(lambda context: TrainerControl(should_training_stop=True))

    assert context.control.should_training_stop is False


def test_return_values_of_hugging_face_handlers_are_controls(calls):
    context = calls(lambda state, control, **kwargs: TrainerControl(should_training_stop=True), control=Control(rank=1))

    assert context.control.should_training_stop is True


class TestNameThatBothConventionsHave:
    """Told apart by base class, then signature; `on_log` and `on_train_end` are in both."""

    def heard(self, callback, run):
        manager = CallbackManager()
        manager.add(callback)
        context = CallbackContext(run, ["chunk"], logs={"loss": 1.0})
        manager.fire("on_log", context)
        return context

    @pytest.mark.parametrize("base", [Callback, object])
    def test_context_signature(self, base, run):
        class Mine(base):
            def on_log(self, context):
                self.got = context

        mine = Mine()
        assert self.heard(mine, run) is mine.got

    @pytest.mark.parametrize("base", [TrainerCallback, Callback, object])
    def test_hugging_face_signature(self, base, run):
        class Mine(base):
            def on_log(self, args, state, control, logs=None, **kwargs):
                self.got = logs

        mine = Mine()
        self.heard(mine, run)
        assert mine.got == {"loss": 1.0}

    def test_base_class_decides_where_the_signature_says_nothing(self, run):
        class Bridge(Callback):
            def on_log(self, *args, **kwargs):
                self.got = args

        class HuggingFace(TrainerCallback):
            def on_log(self, *args, **kwargs):
                self.got = args

        bridge, hugging_face = Bridge(), HuggingFace()
        context = self.heard(bridge, run)
        assert bridge.got == (context,)
        context = self.heard(hugging_face, run)
        assert hugging_face.got[2] is context.control

    def test_one_hugging_face_keyword_alone_is_the_context_unless_the_base_class_says_otherwise(self, run):
        class Bridge(Callback):
            def on_log(self, state):
                self.got = state

        class HuggingFace(TrainerCallback):
            def on_log(self, state):
                self.got = state

        bridge, hugging_face = Bridge(), HuggingFace()
        assert self.heard(bridge, run) is bridge.got
        self.heard(hugging_face, run)
        assert hugging_face.got.global_step == 0

    def test_a_context_signature_in_a_hugging_face_class(self, run):
        class Mixed(TrainerCallback):
            def on_log(self, context):
                self.got = context

        mixed = Mixed()
        assert self.heard(mixed, run) is mixed.got


@pytest.mark.parametrize("base", [Callback, TrainerCallback])
def test_a_method_without_self_is_refused_by_name(base):
    class Forgets(base):
        def on_step_end(args, state, control, **kwargs):
            pass

    with pytest.raises(CallbackError, match=r"Forgets.on_step_end.* first parameter is 'args'.*; put self before it"):
        CallbackManager().add(Forgets())
