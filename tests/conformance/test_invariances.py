"""`check --invariances`: each invariance sees the fault that it is about, and right code passes all of them."""

import functools
import importlib
import json
import textwrap

import jsonschema
import pytest

from goldenppo.adapters.interface import AdapterError
from goldenppo.adapters.loader import load
from goldenppo.conformance import invariances
from goldenppo.conformance.cases import clauses, folder
from goldenppo.conformance.cases import load as load_cases
from goldenppo.conformance.cli import main
from goldenppo.conformance.ranks import Ranks
from goldenppo.conformance.result import run_check
from goldenppo.conformance.run import DTYPES, calls
from goldenppo.conformance.targets import open_adapter

AGGREGATE = """
import torch
def aggregate(x, mask):
    return torch.where(mask, x, 0.0).sum() / mask.sum().to(x.dtype)
"""
GAE = """
import torch
def gae(rewards, values, mask, *, gamma, lam):
    rewards, values = torch.where(mask, rewards, 0.0), torch.where(mask, values, 0.0)
    advantages, running, following = torch.zeros_like(values), 0.0, 0.0
    for t in reversed(range(values.shape[1])):
        on = mask[:, t]
        delta = rewards[:, t] + gamma * following - values[:, t]
        running = torch.where(on, delta + gamma * lam * running, running)
        following = torch.where(on, values[:, t], following)
        advantages[:, t] = torch.where(on, running, 0.0)
    return {"advantages": advantages, "returns": torch.where(mask, advantages + values, 0.0)}
"""
POLICY = """
import torch
def policy_loss(logprobs, old_logprobs, advantages, mask, *, clip_low, clip_high):
    r = torch.where(mask, logprobs - old_logprobs, 0.0).exp()
    A = torch.where(mask, advantages, 0.0)
    loss = torch.maximum(-A * r, -A * r.clamp(1 - clip_low, 1 + clip_high))
    return torch.where(mask, loss, 0.0).sum() / mask.sum().clamp(min=1).to(loss.dtype)
"""
MEAN_OF_MEANS = """
def accumulated_policy_loss(parts, *, clip_low, clip_high):
    return sum(policy_loss(*part, clip_low=clip_low, clip_high=clip_high) for part in parts) / len(parts)
"""
BY_TOKENS = """
def accumulated_policy_loss(parts, *, clip_low, clip_high):
    import torch.distributed as dist
    tokens, ranks = sum(part[3].sum() for part in parts), 1
    if dist.is_initialized():
        ranks = dist.get_world_size()
        dist.all_reduce(tokens)
    losses = [policy_loss(*part, clip_low=clip_low, clip_high=clip_high) * part[3].sum().double() for part in parts]
    return sum(losses) * ranks / tokens
"""
BY_OWN_TOKENS = BY_TOKENS.replace("dist.is_initialized()", "False")


def examined(path, ops=(), ranks=False, dtypes=DTYPES):
    """What became of each invariance of an adapter: (op, clause) → finding."""
    session = open_adapter(str(path))
    processes = Ranks(str(path), None, None, 60) if ranks else None
    try:
        check = run_check(session, list(ops), "must", dtypes, "cpu")
        findings = invariances.check(session, check, processes)
    finally:
        session.close()
        if processes:
            processes.close()
    return {(finding.op, finding.clause): finding for finding in findings}


def failing(found):
    return {clause for (_, clause), finding in found.items() if finding.verdict == "fails"}


@pytest.fixture
def plant(tmp_path):
    """Writes an adapter file; each text replaces another one, which must be there."""

    def write(text, *replacements):
        for old, new in replacements:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "planted.py"
        path.write_text(textwrap.dedent(text))
        return path

    return write


# --- right code passes --------------------------------------------------------------------------------------


def test_the_reference_keeps_every_invariance():
    """Each clause is compared on at least one op, and none fails."""
    found = examined("reference")

    assert not failing(found)
    assert not {label: clause for label, clause in found.items() if clause.verdict == "coarse"}
    compared = {clause for (_, clause), finding in found.items() if finding.verdict == "holds"}
    assert compared == set(clauses()) & set(invariances.INVARIANCES) - {"INV-7"}


@pytest.mark.parametrize("text", [AGGREGATE, GAE, POLICY, POLICY + BY_TOKENS])
def test_what_the_planted_faults_start_from_is_right(plant, text):
    assert not failing(examined(plant(text)))


# --- each clause sees its fault -----------------------------------------------------------------------------

FAULTS = {
    "mask ignored": (AGGREGATE, [("torch.where(mask, x, 0.0).sum()", "x.sum()")], {"INV-1", "INV-2", "INV-4", "INV-12"}),
    "NaN times 0": (AGGREGATE, [("torch.where(mask, x, 0.0)", "(x * mask)")], {"INV-2"}),
    "first row's mean removed": (
        "import torch\ndef whiten(x, mask):\n    y = torch.where(mask, x, 0.0)\n    n = mask.sum()\n    mean = y.sum() / n\n"
        "    var = torch.where(mask, (y - mean) ** 2, 0.0).sum() / (n - 1)\n    first = y[0].sum() / mask[0].sum()\n"
        "    return torch.where(mask, (y - first) * (var + 1e-8).rsqrt(), 0.0)",
        [],
        {"INV-3"},
    ),
    "width for the horizon": (
        "import torch\ndef aggregate(x, mask, *, horizon):\n"
        "    return (torch.where(mask, x, 0.0).sum(1) / x.shape[1]).mean()",
        [],
        {"INV-4"},
    ),
    "next value by length": (
        GAE,
        [("following = torch.where(on, values[:, t], following)", "following = torch.where(mask.sum(1) > t, values[:, t], 0.0)")],
        {"INV-5", "INV-8"},
    ),
    "advantages whitened in the loss": (
        POLICY,
        [("r = torch", "advantages = advantages - advantages[mask].mean()\n    r = torch")],
        {"INV-6", "INV-10", "INV-12"},
    ),
    "mean of means": (POLICY + MEAN_OF_MEANS, [], {"INV-6", "INV-12"}),
    "last value bootstraps itself": (
        GAE,
        [("torch.zeros_like(values), 0.0, 0.0", "torch.zeros_like(values), 0.0, values[:, -1]")],
        {"INV-4", "INV-5", "INV-8"},
    ),
    "rewards clipped": (GAE, [("torch.where(mask, rewards, 0.0),", "torch.where(mask, rewards, 0.0).clamp(-1, 1),")], {"INV-9"}),
    "ratio squared": (POLICY, [("old_logprobs, 0.0).exp()", "old_logprobs, 0.0).exp() ** 2")], {"INV-10"}),
    "half precision at float64": (
        AGGREGATE,
        [("    return", "    if x.dtype == torch.float64:\n        x = (x / 3).half().double() * 3\n    return")],
        {"INV-11"},
    ),
    "empty rows counted in accumulation": (
        "import torch\ndef policy_loss(logprobs, old_logprobs, advantages, mask, *, clip_low, clip_high, counted=None):\n"
        "    r = torch.where(mask, logprobs - old_logprobs, 0.0).exp()\n    A = torch.where(mask, advantages, 0.0)\n"
        "    loss = torch.maximum(-A * r, -A * r.clamp(1 - clip_low, 1 + clip_high)).sum(1) / mask.sum(1).clamp(min=1)\n"
        "    return loss.sum() / (mask.any(1).sum() if counted is None else counted)\n"
        "def accumulated_policy_loss(parts, *, clip_low, clip_high):\n"
        "    rows = sum(len(part[3]) for part in parts)\n"
        "    return sum(policy_loss(*part, clip_low=clip_low, clip_high=clip_high, counted=rows) for part in parts)",
        [],
        {"INV-12"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(FAULTS))
def test_a_planted_fault_breaks_its_invariances_and_no_others(plant, name):
    text, replacements, broken = FAULTS[name]

    found = examined(plant(text, *replacements))

    assert failing(found) == broken


def test_every_clause_has_a_planted_fault():
    """INV-7 has its own test, with processes."""
    assert {clause for _, _, broken in FAULTS.values() for clause in broken} | {"INV-7"} == set(invariances.INVARIANCES)


def test_the_counterexample_of_a_mean_of_means_is_two_rows_of_one_and_two_tokens(plant):
    finding = examined(plant(POLICY + MEAN_OF_MEANS))["policy_loss", "INV-6"]

    mask = finding.given.inputs["mask"]
    assert sorted(map(sum, mask)) == [1, 2] and len(mask[0]) == 2
    assert "micro-batches of rows 0 | 1" in finding.what
    assert finding.claim.got != finding.claim.want and finding.use > 1e6


def test_a_row_that_raises_only_when_changed_is_a_failure(plant):
    path = plant(AGGREGATE, ("    return", "    assert mask[:, -1].any()\n    return"))

    found = examined(path)

    assert found["aggregate", "INV-4"].problem.startswith("AssertionError")
    assert found["aggregate", "INV-4"].verdict == "fails"


def test_float32_inside_is_coarse_and_no_failure(plant):
    found = examined(
        plant(POLICY.replace("clamp(min=1).to(loss.dtype)", "clamp(min=1).float()").replace("0.0).exp()", "0.0).float().exp()"))
    )

    assert not failing(found)
    assert found["policy_loss", "INV-3"].verdict in ("coarse", "holds")
    assert any(finding.verdict == "coarse" for finding in found.values())


# --- ranks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        (BY_TOKENS, set()),
        (BY_OWN_TOKENS, {"INV-7"}),
        (MEAN_OF_MEANS, {"INV-6", "INV-7", "INV-12"}),
    ],
    ids=["tokens of all ranks", "tokens of one rank", "mean of means"],
)
def test_ranks_tell_token_counts_from_means_of_means(plant, text, broken):
    found = examined(plant(POLICY + text), ranks=True, dtypes=("float64",))

    assert failing(found) == broken
    assert found["policy_loss", "INV-7"].verdict == ("fails" if "INV-7" in broken else "holds")
    if broken:
        assert "2 ranks" in found["policy_loss", "INV-7"].what


def test_the_reference_is_the_same_over_ranks():
    """In every way that it can be asked: both losses, every aggregation."""
    found = examined("reference", ["policy_loss", "value_loss"], ranks=True, dtypes=("float64",))

    assert not failing(found)
    assert {found[op, "INV-7"].verdict for op in ("policy_loss", "value_loss")} == {"holds"}


def test_ranks_that_cannot_start_are_a_reason_and_no_pass(plant, tmp_path):
    """The processes are another interpreter, in which the adapter does not load."""
    path = plant(POLICY + BY_TOKENS)
    session, ranks = open_adapter(str(path)), Ranks(str(tmp_path / "gone.py"), None, None, 60)
    check = run_check(session, ["policy_loss"], "must", ("float64",), "cpu")
    found = {finding.clause: finding for finding in invariances.check(session, check, ranks)}
    ranks.close()

    assert found["INV-7"].verdict == "not-compared"
    assert "a rank does not start: there is no file" in found["INV-7"].reason


def test_a_rank_that_raises_ends_the_others(plant):
    """Rank 1 raises before it takes part in the count, so rank 0 would wait for ever."""
    late = BY_TOKENS.replace("        dist.all_reduce", "        assert dist.get_rank() == 0, 'no'\n        dist.all_reduce")

    finding = examined(plant(POLICY + late), ranks=True, dtypes=("float64",))["policy_loss", "INV-7"]

    assert finding.verdict == "fails" and "AssertionError: no" in finding.problem


# --- the command --------------------------------------------------------------------------------------------


def test_a_broken_invariance_decides_the_exit_code_only_where_it_was_asked_for(plant, capsys, tmp_path):
    path, written = str(plant(POLICY + MEAN_OF_MEANS)), tmp_path / "result.json"
    assert main(["check", path]) == 0
    capsys.readouterr()

    assert main(["check", path, "--invariances", "--json", str(written)]) == 1

    output = capsys.readouterr().out
    assert "FAIL policy_loss: INV-6 (must) in float64" in output
    assert clauses()["INV-6"]["sentence"][:60] in output
    assert "micro-batches of rows 0 | 1" in output and "(2 rows × 2 positions)" in output
    assert "breaks invariances: policy_loss" in output
    assert all(len(line) <= 80 for line in output.split("\n"))
    document = json.loads(written.read_text())
    jsonschema.validate(document, json.loads((folder("conformance") / "result.schema.json").read_text()))
    rows = {row["clause"]: row for row in document["invariances"]}
    assert rows["INV-6"]["verdict"] == rows["INV-7"]["verdict"] == "fails"
    assert rows["INV-6"]["smallest"]["inputs"]["mask"] and rows["INV-6"]["got"] != rows["INV-6"]["want"]
    assert document["exit_code"] == 1


def test_the_level_says_which_invariances_decide(plant, capsys):
    path = str(plant(AGGREGATE, ("torch.where(mask, x, 0.0)", "(x * mask)")))

    assert main(["check", path, "--invariances"]) == 0
    assert "INV-2 (robust) fails above the level that decides: aggregate" in capsys.readouterr().out
    assert main(["check", path, "--invariances", "--level", "robust"]) == 1
    assert "NaN at masked slots" in capsys.readouterr().out


def test_a_result_without_the_flag_has_no_invariances(plant, tmp_path):
    written = tmp_path / "result.json"
    main(["check", str(plant(AGGREGATE)), "--json", str(written)])

    assert "invariances" not in json.loads(written.read_text())


def test_a_function_without_a_mask_is_compared_where_it_can_be(plant):
    found = examined(
        plant("def policy_loss(logprobs, old_logprobs, advantages, *, clip):\n    r = (logprobs - old_logprobs).exp()\n"
              "    return -(r * advantages).min(r.clamp(1 - clip, 1 + clip) * advantages).mean()")
    )  # fmt: skip

    assert found["policy_loss", "INV-1"].verdict == "not-compared"
    assert found["policy_loss", "INV-1"].reason == "takes no mask"
    assert {found["policy_loss", label].verdict for label in ("INV-3", "INV-6", "INV-10")} == {"holds"}


# --- real trainers ------------------------------------------------------------------------------------------

# The trainer's own loss without the global counts, micro-batches under equal weights: what a loop does that leaves them out.
REAL = {
    "verl": """
from goldenppo.adapters.verl import *
from goldenppo.adapters.verl import policy_loss
def accumulated_policy_loss(parts, *, clip_low, clip_high, dual_clip, horizon, aggregation):
    how = dict(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip, horizon=horizon, aggregation=aggregation)
    return sum(policy_loss(*part, **how)["loss"] for part in parts) / len(parts)
""",
    "openrlhf": """
from types import SimpleNamespace
from goldenppo.adapters.openrlhf import *
from goldenppo.adapters.openrlhf import loss_utils, losses
def accumulated_policy_loss(parts, *, clip_low, clip_high, dual_clip=None, aggregation):
    by_token = aggregation == "token_mean"
    module = losses.PolicyLoss(clip_eps_low=clip_low, clip_eps_high=clip_high, dual_clip=dual_clip, token_level_loss=by_token)
    infos = [loss_utils.get_loss_batch_info(SimpleNamespace(), part[3]) for part in parts]
    return sum(module(*part, **info)[0] for part, info in zip(parts, infos)) / len(parts)
""",
}


def built_in(name):
    """Skips where the trainer is not installed; `tox -e verl` and its like have one each."""
    try:
        return load(name)
    except AdapterError as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("name", list(REAL))
def test_a_real_trainer_passes_by_its_counts_and_is_flagged_without_them(name, plant):
    """The trainer's own loop over micro-batches and ranks keeps INV-6 and INV-7; its loss in a mean of means does not."""
    built_in(name)

    own = examined(name, ["policy_loss", "value_loss"], ranks=True, dtypes=("float64", "float32"))
    means = examined(plant(REAL[name]), ["policy_loss"], ranks=True, dtypes=("float64", "float32"))

    verdicts = {own[op, label].verdict for op in ("policy_loss", "value_loss") for label in ("INV-6", "INV-7")}
    assert verdicts <= {"holds", "coarse"}
    assert {"INV-6", "INV-7"} <= failing(means)
    assert sorted(map(sum, means["policy_loss", "INV-6"].given.inputs["mask"])) == [1, 2]


def test_trl_averages_the_means_of_micro_batches_and_of_ranks():
    """PPOTrainer.train() with gradient accumulation; `tox -e trl-ppo`."""
    built_in("trl-ppo")

    found = examined("trl-ppo", ["policy_loss"], ranks=True, dtypes=("float64", "float32"))

    assert {"INV-6", "INV-7"} <= failing(found)
    assert sorted(map(sum, found["policy_loss", "INV-6"].given.inputs["mask"])) == [1, 2]
    assert found["policy_loss", "INV-6"].claim.part == "loss"


@pytest.mark.parametrize("name", [*REAL, "trl-ppo"])
def test_accumulation_runs_the_trainer(name, monkeypatch):
    """Without any one of the functions that SOURCES names, nothing is accumulated."""
    module = built_in(name)
    session = open_adapter(name)
    for accumulated in [source for source in module.SOURCES if source.startswith("accumulated_")]:
        op = accumulated.removeprefix("accumulated_")
        cases = [case for case in load_cases(op) if case.level == "must"]
        offer = session.hello()["ops"][op]
        requests = [
            {
                **{"op": op, "inputs": case.inputs, "params": case.params, "axes": calls(case, offer)[0]},
                **{"dtype": "float32", "device": "cpu", "gradients": invariances.differentiated(op), "constants": []},
                "parts": [[row] for row in range(len(case.inputs["mask"]))],
            }
            for case in cases
        ]
        request = next(request for request in requests if "result" in session.call(request))
        sources = module.SOURCES[accumulated]
        for source in [sources] if isinstance(sources, str) else sources:
            where, _, qualified = source.partition(":")
            *path, last = qualified.split(".")
            owner = functools.reduce(getattr, path, importlib.import_module(where))
            with monkeypatch.context() as patch:
                patch.setattr(owner, last, _gone)
                assert session.call(request).get("error", {}).get("message") == "gone", source


def _gone(*_, **__):
    raise RuntimeError("gone")
