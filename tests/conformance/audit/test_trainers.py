"""Dumps of real trainers, made by examples/, are audited end to end.

Each environment of tox has one trainer; where there is none the tests are skipped.
"""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from goldenppo.adapters.interface import AdapterError
from goldenppo.adapters.loader import load
from goldenppo.adapters.session import Session
from goldenppo.conformance import cases
from goldenppo.conformance.audit.dump import Dump
from goldenppo.conformance.audit.engine import audit
from goldenppo.conformance.audit.step import Step
from goldenppo.conformance.commands.identify import check_undeclared, conventions

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
TRAINERS = {"trl-ppo": "record_trl.py", "verl": "record_verl.py", "openrlhf": "record_openrlhf.py"}
EDGES = {  # those that each dump allows; True: right
    "trl-ppo": {
        **dict.fromkeys(("logprobs", "entropy", "kl", "rewards", "experience", "ratio", "value_loss", "total_loss"), True),
        "policy_loss": False,  # its approx_kl is a mean over padding too
    },
    "verl": dict.fromkeys(
        ("logprobs", "entropy", "kl", "rewards", "advantages", "policy_loss", "value_loss", "mean_entropy", "total_loss"), True
    ),
    "openrlhf": dict.fromkeys(
        ("logprobs", "entropy", "kl", "rewards", "advantages", "whitening", "policy_loss", "value_loss", "mean_entropy"), True
    ),
}
SPLIT = {  # what is wrong when the batch is split into three micro-batches of two rows
    "trl-ppo": {"policy_loss", "micro_policy_loss"},  # the mean of the micro-batches' token means
    "verl": set(),
    "openrlhf": {"policy_loss", "micro_policy_loss", "mean_entropy"},  # reported numbers are weighted by tokens twice
}


@pytest.fixture(scope="module", params=TRAINERS)
def trainer(request):
    """The name of a trainer that is installed here."""
    try:
        load(request.param)
    except AdapterError as reason:
        pytest.skip(str(reason))
    return request.param


@pytest.fixture(scope="module")
def dump(trainer, tmp_path_factory):
    """A step of the trainer, recorded by its example."""
    return record(trainer, tmp_path_factory.mktemp("dump"))


def record(name: str, folder: Path, *arguments: str) -> Path:
    """Runs an example in a process of its own."""
    path = folder / "step.safetensors"
    command = [sys.executable, str(EXAMPLES / TRAINERS[name]), str(path), *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert f"goldenppo audit {path}" in ran.stdout
    return path


def found(path: Path) -> dict:
    """Edge → what was found out about it, without those that lack something."""
    return {finding.edge.name: finding for finding in audit(Step(Dump([str(path)]))) if finding.verdict != "unchecked"}


def test_every_edge_has_the_verdict_and_the_variants_that_identify_reports(trainer, dump):
    edges = found(dump)
    everything = SimpleNamespace(op=[], dtype=["float32"], device="cpu")
    check = check_undeclared(Session(load(trainer), cases.table(), name=trainer), everything, None)
    identified, failed = conventions(check), {report.op: report for report in check.ops if report.failed}

    verdicts = {name: finding.verdict == "right" for name, finding in edges.items() if not name.startswith("micro_")}
    assert verdicts == EDGES[trainer]
    compared = 0
    for finding in edges.values():
        op = finding.edge.op
        for axis, values in finding.variant.items():
            if (op, axis) in identified:
                compared += 1
                one, other = set(values), set(identified[op, axis])
                assert one <= other or other <= one, f"{finding.edge.name}, {axis}: {values} in the dump, {identified[op, axis]}"
        if finding.verdict == "wrong":
            assert names(finding.report) & names(failed[op]), f"{finding.edge.name} is wrong as the trainer's {op} is not"
    assert compared >= 10


def names(report) -> set[str]:
    return {match.id for match in report.matches if match.exact}


def test_a_changed_number_is_flagged_at_its_edge(trainer, dump, tmp_path):
    before = wrong(found(dump))
    for name, edges in {"rewards": {"rewards"}, "returns": {"advantages", "experience"}, "value_loss": {"value_loss"}}.items():
        changed = found(perturbed(dump, name, tmp_path / "changed.safetensors"))
        new = wrong(changed) - before

        assert new & edges, f"{name} is changed and {edges} not flagged"
        assert all(name in changed[edge].ends.values() for edge in new), f"{name} is changed and {new} flagged"


def wrong(edges: dict) -> set[str]:
    return {name for name, finding in edges.items() if finding.verdict == "wrong"}


def perturbed(path: Path, name: str, target: Path) -> Path:
    """A copy of a dump with one number of a tensor moved by 1/8, at the first token of the second row."""
    with safe_open(path, "pt") as file:
        tensors, metadata = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
    tensor, mask = tensors[name], tensors["mask"]
    if tensor.dim():
        tensor[1, int(mask[1].int().argmax())] += 0.125
    else:
        tensor += 0.125
    assert json.loads(metadata["params"])
    save_file(tensors, target, metadata)
    return target


def test_micro_batches_that_add_up_to_another_loss_are_flagged(trainer, tmp_path):
    edges = found(record(trainer, tmp_path, "3"))

    assert wrong(edges) == SPLIT[trainer]
    assert edges["micro_policy_loss"].compared == 1
    if "micro_policy_loss" in SPLIT[trainer]:
        assert "INV-6" in edges["micro_policy_loss"].reason
