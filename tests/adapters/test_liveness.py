"""Built-in adapters run the trainer's own code: without the function that SOURCES names, the op fails.

A trainer that is not installed where the tests run is skipped; `tox -e verl` and its like have one each.
"""

import importlib
import itertools
import sys
import types
from functools import partial

import pytest

from goldenppo.adapters import Unsupported
from goldenppo.adapters.interface import AdapterError
from goldenppo.adapters.loader import built_in, load
from goldenppo.adapters.session import Session
from goldenppo.conformance import cases
from goldenppo.conformance.run import attempts


class _Replaced(Exception):
    """Raised by what stands in the place of a trainer's function."""


def _raise(*_, **__):
    raise _Replaced("the trainer's function was called")


def _answers(session, op):
    """The adapter's answers to the op's cases, one by one, in float32 (trainers that know no other dtype take it)."""
    offer = session.hello()["ops"][op]
    found = attempts(session, op, offer, cases.load(op), ("float32",), "cpu")
    return (attempt.answer for attempt in found if "unsupported" not in attempt.answer)


def _sources(module, op):
    named = module.SOURCES[op]
    return [named] if isinstance(named, str) else list(named)


def _owner(source):
    """The module or class that holds a function, and the function's name in it."""
    where, _, qualified = source.partition(":")
    *path, name = qualified.split(".")
    owner = importlib.import_module(where)
    for part in path:
        owner = getattr(owner, part)
    return owner, name


def _calls(session, op, source, monkeypatch):
    """Whether at least one case of the op fails by our own exception once the source is replaced.

    An adapter that reads the source's statements in the place of calling it (DeepSpeed-Chat's DPO script) fails by an error of
    its own: that of the first case counts, which gave a result before.
    """
    with monkeypatch.context() as patch:
        patch.setattr(*_owner(source), _raise)
        answers = list(_answers(session, op))
        return "error" in next(iter(answers), {}) or any(_type(answer) == _Replaced.__name__ for answer in answers)


def _type(answer):
    return answer.get("error", {}).get("type")


@pytest.fixture(scope="module")
def opened():
    """Sessions of the built-in adapters, each opened once; an AdapterError where the trainer is not at hand."""
    sessions: dict[str, Session | AdapterError] = {}

    def open_adapter(name):
        if name not in sessions:
            try:
                sessions[name] = Session(load(name), cases.table(), name=name)
            except AdapterError as reason:
                sessions[name] = reason
        return sessions[name]

    return open_adapter


@pytest.mark.parametrize("name", sorted(built_in()))
def test_every_op_of_a_built_in_adapter_runs_the_trainer(name, opened, monkeypatch):
    """Each op names its sources, works with them, and fails without any one of them."""
    session = opened(name)
    if isinstance(session, AdapterError):
        pytest.skip(str(session))
    idle = []
    for op in session.ops:
        assert op in session.module.SOURCES, f"{name} does not say in SOURCES what {op} runs"
        first = next(_answers(session, op), None)
        assert first is not None, f"{name} offers {op} and supports none of its cases"
        assert "result" in first, f"{name} fails in {op} before anything is replaced: {first}"
        idle += [f"{op}: {source}" for source in _sources(session.module, op) if not _calls(session, op, source, monkeypatch)]

    assert not idle, f"{name} gets its answers without {'; '.join(idle)}"


def _toy(monkeypatch, total_loss):
    """A trainer with one function, and an adapter of it."""
    trainer = types.ModuleType("toy_trainer")
    trainer.combine = lambda policy, value, entropy, kl, a, b, c: policy + a * value - b * entropy + c * kl
    monkeypatch.setitem(sys.modules, trainer.__name__, trainer)
    adapter = types.ModuleType("toy_adapter")
    adapter.SOURCES = {"total_loss": "toy_trainer:combine"}
    adapter.total_loss = partial(total_loss, trainer)
    return Session(adapter, cases.table(), name="toy")


def _through_the_module(trainer, policy_loss, value_loss, entropy, kl_loss, *, vf_coef, entropy_coef, kl_loss_coef):
    return trainer.combine(policy_loss, value_loss, entropy, kl_loss, vf_coef, entropy_coef, kl_loss_coef)


def _by_itself(trainer, policy_loss, value_loss, entropy, kl_loss, *, vf_coef, entropy_coef, kl_loss_coef):
    return policy_loss + vf_coef * value_loss - entropy_coef * entropy + kl_loss_coef * kl_loss


def _refuses(trainer, policy_loss, value_loss, entropy, kl_loss, *, vf_coef, entropy_coef, kl_loss_coef):
    raise Unsupported("nothing")


@pytest.mark.parametrize(("adapter", "alive"), [(_through_the_module, True), (_by_itself, False), (_refuses, False)])
def test_an_adapter_that_computes_for_itself_is_seen(adapter, alive, monkeypatch):
    """The same formula, once asked of the trainer and once written into the adapter."""
    session = _toy(monkeypatch, adapter)

    assert _calls(session, "total_loss", "toy_trainer:combine", monkeypatch) is alive


def test_sources_are_found_in_classes_too():
    owner, name = _owner("itertools:chain.from_iterable")

    assert (owner, name) == (itertools.chain, "from_iterable")
