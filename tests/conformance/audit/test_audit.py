"""Audits of clean dumps, of dumps in other layouts, and of files that are no dumps."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from goldenppo.conformance import Recorder
from goldenppo.conformance.audit.dump import Dump
from goldenppo.conformance.audit.engine import audit, audit_ranks
from goldenppo.conformance.audit.step import Step
from goldenppo.conformance.cases import folder
from goldenppo.conformance.cli import main
from goldenppo.reference import gae, kl_penalty, policy_loss, shaped_rewards, token_logprobs, value_loss

RUN = folder("fixtures") / "run" / "cpu-float64"
PARAMS = {"kl_coef": 0.05, "gamma": 0.97, "lam": 0.9, "clip": 0.2, "value_clip": 0.15, "temperature": 0.7}


def step_of(rows=6, width=9, dtype=torch.float64, whitening="none", lengths=None, seed=0, **changes):
    """A whole step made by the reference in some dtype: tensors under their canonical names."""
    torch.manual_seed(seed)
    params = PARAMS | changes
    lengths = torch.tensor(lengths if lengths else [width, width - 2, 3, width - 1, 1, width - 3][:rows])
    logits = torch.randn(rows, width + 1, 11).to(dtype) * 2
    tokens = torch.randint(0, 11, (rows, width + 1))
    x = {"logits": logits, "tokens": tokens, "mask": torch.arange(width) < lengths[:, None]}
    x["old_logprobs"] = token_logprobs(logits, tokens, temperature=params["temperature"])
    x["ref_logprobs"] = x["old_logprobs"] + 0.3 * torch.randn(rows, width).to(dtype)
    x["scores"], x["old_values"] = torch.randn(rows).to(dtype), torch.randn(rows, width).to(dtype)
    x["kl"] = kl_penalty(x["old_logprobs"], x["ref_logprobs"])
    x["rewards"] = shaped_rewards(x["old_logprobs"], x["ref_logprobs"], x["scores"], x["mask"], kl_coef=params["kl_coef"])
    chain = gae(x["rewards"], x["old_values"], x["mask"], gamma=params["gamma"], lam=params["lam"], whitening=whitening)
    x |= chain._asdict()
    x["logprobs"] = x["old_logprobs"] + 0.2 * torch.randn(rows, width).to(dtype)
    x["values"] = x["old_values"] + 0.2 * torch.randn(rows, width).to(dtype)
    policy = policy_loss(
        x["logprobs"], x["old_logprobs"], x["advantages"], x["mask"], clip_low=params["clip"], clip_high=params["clip"]
    )
    value = value_loss(x["values"], x["old_values"], x["returns"], x["mask"], clip=params["value_clip"])
    x |= {"policy_loss": policy.loss, "clip_fraction": policy.clip_fraction, "approx_kl": policy.approx_kl}
    del x["logits"], x["tokens"]  # they belong to the old log-probs, and the new ones are there
    return x | {"value_loss": value.loss, "value_clip_fraction": value.clip_fraction}, params


def write(path: Path, tensors: dict, params: dict | None = None) -> str:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"params": json.dumps(params or {})})
    return str(path)


def audited(path: str, **flags) -> dict:
    return {finding.edge.name: finding for finding in audit(Step(Dump([path]), **flags))}


def verdicts(found: dict) -> dict[str, str]:
    return {name: finding.verdict for name, finding in found.items() if not finding.reason.startswith("the dump has no")}


EDGES = {"kl", "rewards", "advantages", "policy_loss", "value_loss"}


@pytest.mark.parametrize("path", sorted(RUN.glob("*.safetensors")), ids=lambda path: path.stem)
def test_the_four_model_run_audits_clean(path):
    found = audited(str(path))

    assert {finding.verdict for finding in found.values() if not finding.reason.startswith("the dump has no")} <= {"right"}
    if path.stem.startswith("step"):
        assert len([finding for finding in found.values() if finding.verdict == "right"]) >= 5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_in_a_narrower_dtype_audits_clean(tmp_path, dtype):
    arguments = ["run", "--size", "tiny", "--steps", "2", "--dtype", dtype, "--record", str(tmp_path / "run")]
    assert main(arguments) == 0

    for path in sorted((tmp_path / "run").glob("step*.safetensors")):
        found = audited(str(path))
        assert all(f.verdict == "right" for f in found.values() if not f.reason.startswith("the dump has no")), path.stem
        assert {finding.dtype for finding in found.values() if finding.verdict == "right"} <= {dtype, "float32"}


@pytest.mark.parametrize("size", [{"rows": 6, "width": 9}, {"rows": 6, "width": 300, "lengths": [300, 298, 3, 120, 1, 17]}])
@pytest.mark.parametrize("whitening", ["none", "inside"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_step_of_the_reference_is_right_and_its_variants_are_told(tmp_path, size, whitening, dtype):
    tensors, params = step_of(whitening=whitening, dtype=dtype, **size)

    found = audited(write(tmp_path / "d.safetensors", tensors, params))

    assert verdicts(found) == dict.fromkeys(EDGES, "right")
    assert found["rewards"].variant["score_at"] == ["last_token"] and found["rewards"].variant["estimator"] == ["k1"]
    assert found["advantages"].variant["whitening"] == [whitening]
    assert found["policy_loss"].variant["aggregation"] == ["token_mean"]


@pytest.mark.parametrize("name", ["rewards", "advantages", "returns", "kl", "policy_loss", "value_loss", "approx_kl"])
@pytest.mark.parametrize("width", [9, 300])
def test_one_number_that_is_off_is_found_at_its_edge(tmp_path, name, width):
    tensors, params = step_of(width=width, lengths=[width, width - 2, 3, width - 1, 1, 5])
    flat = tensors[name] = tensors[name].clone()
    if flat.dim():
        flat[1, 2] += 1e-4
    else:
        flat += 1e-4

    found = audited(write(tmp_path / "d.safetensors", tensors, params))
    wrong = {edge for edge, finding in found.items() if finding.verdict == "wrong"}

    home = {"returns": "advantages", "approx_kl": "policy_loss"}.get(name, name)
    assert home in wrong
    assert wrong <= {home, "advantages", "policy_loss", "value_loss"}  # and whatever is computed from the number


@pytest.mark.parametrize("width", [9, 300])
@pytest.mark.parametrize("name", ["advantages", "rewards", "value_loss"])
def test_float32_accuracy_in_a_float64_dump_is_coarse_and_no_fault(tmp_path, name, width):
    tensors, params = step_of(width=width, lengths=[width, width - 2, 3, width - 1, 1, 5])
    tensors[name] = tensors[name].float().double()
    only = {"advantages": ["advantages"], "rewards": ["rewards"], "value_loss": ["value_loss"]}[name]

    (finding,) = audit(Step(Dump([write(tmp_path / "d.safetensors", tensors, params)])), only)

    assert finding.verdict == "right" and finding.report.precision == "coarse"


def test_a_bug_in_a_large_dump_is_named(tmp_path):
    tensors, params = step_of(width=300, lengths=[300, 298, 3, 120, 1, 17])
    tensors["advantages"] = tensors["returns"] = None
    from goldenppo.reference.deviations import deviations

    wrong = deviations("gae")["gae-gamma-lambda-swapped"](
        tensors["rewards"], tensors["old_values"], tensors["mask"], gamma=params["gamma"], lam=params["lam"]
    )
    tensors |= {"advantages": wrong.advantages, "returns": wrong.returns}
    tensors = {name: tensor for name, tensor in tensors.items() if name not in ("policy_loss", "value_loss")}

    found = audited(write(tmp_path / "d.safetensors", tensors, params))

    assert found["advantages"].verdict == "wrong"
    assert "gae-gamma-lambda-swapped" in {match.id for match in found["advantages"].report.matches if match.exact}


def test_parameters_that_are_not_given_are_read_from_the_numbers(tmp_path):
    tensors, _ = step_of(whitening="inside")

    found = audited(write(tmp_path / "d.safetensors", tensors))

    assert verdicts(found) == dict.fromkeys(EDGES, "right")
    read = {name: item.value for finding in found.values() for name, item in finding.inferred.items()}
    assert {name: read[name] for name in ("kl_coef", "gamma", "lam", "clip_low")} == {
        "kl_coef": 0.05,
        "gamma": 0.97,
        "lam": 0.9,
        "clip_low": 0.2,
    }
    assert read["clip"] == 0.15


def test_temperature_and_score_clip_are_read_from_the_numbers(tmp_path):
    torch.manual_seed(1)
    logits, tokens = torch.randn(5, 8, 11, dtype=torch.float64), torch.randint(0, 11, (5, 8))
    logprobs = token_logprobs(logits, tokens, temperature=0.7)
    ref, mask = logprobs + 0.2 * torch.randn(5, 7), torch.ones(5, 7, dtype=torch.bool)
    scores = torch.tensor([3.0, -0.5, 9.0, -7.0, 1.0], dtype=torch.float64)
    rewards = shaped_rewards(logprobs, ref, scores, mask, kl_coef=0.125, score_clip=2.5)
    dump = {"logits": logits, "tokens": tokens, "old_logprobs": logprobs, "ref_logprobs": ref, "mask": mask}

    found = audited(write(tmp_path / "d.safetensors", dump | {"scores": scores, "rewards": rewards}))

    assert found["logprobs"].inferred["temperature"].value == 0.7
    assert found["rewards"].inferred["kl_coef"].value == 0.125
    assert found["rewards"].inferred["score_clip"].value == 2.5


def test_a_parameter_that_the_numbers_contradict_is_said(tmp_path, capsys):
    tensors, params = step_of()

    code = main(["audit", write(tmp_path / "d.safetensors", tensors, params | {"lam": 0.95})])

    assert code == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "the dump gives lam 0.95; its numbers say 0.9 (residual" in said


def test_full_sequences_are_cut_to_the_window(tmp_path):
    tensors, params = step_of()
    prompt = {name: torch.randn(6, 4, dtype=torch.float64) for name in ("values", "old_values", "logprobs", "old_logprobs")}
    wider = dict(tensors)
    for name in ("values", "old_values"):  # one more state than tokens, as for a whole sequence
        wider[name] = torch.cat([prompt[name], tensors[name], torch.randn(6, 1, dtype=torch.float64)], 1)
    for name in ("logprobs", "old_logprobs"):
        wider[name] = torch.cat([prompt[name], tensors[name]], 1)

    step = Step(Dump([write(tmp_path / "d.safetensors", wider, params)]))

    assert verdicts({finding.edge.name: finding for finding in audit(step)}) == dict.fromkeys(EDGES, "right")
    assert any(line.startswith("old_values has 14 positions: columns 4 to 12") for line in step.assumed)


@pytest.mark.parametrize("layout", ["shifted", "aligned"])
def test_logits_and_tokens_of_one_width_are_told_apart_by_the_numbers(tmp_path, layout):
    torch.manual_seed(2)
    logits, tokens = torch.randn(5, 8, 11, dtype=torch.float64), torch.randint(0, 11, (5, 8))
    whole = torch.log_softmax(logits, -1)
    if layout == "aligned":
        logprobs = whole.gather(-1, tokens[..., None])[..., 0]
    else:  # nothing speaks of the first token
        logprobs = torch.cat([torch.zeros(5, 1), whole[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]], 1)
    path = write(tmp_path / "d.safetensors", {"logits": logits, "tokens": tokens, "logprobs": logprobs}, {"temperature": 1.0})

    step = Step(Dump([path]))

    assert step.layout == layout and any("fits better" in line for line in step.assumed)
    assert [finding.verdict for finding in audit(step)] == ["right"]
    other = {"shifted": "aligned", "aligned": "shifted"}[layout]
    assert audited(path, layout=other)["logprobs"].verdict == "wrong"


def test_left_padding_and_a_mask_from_attention_or_pad(tmp_path):
    tensors, params = step_of()
    flipped = {name: tensor.flip(1) if name == "mask" else tensor for name, tensor in tensors.items()}
    again = gae(flipped["rewards"], flipped["old_values"], flipped["mask"], gamma=params["gamma"], lam=params["lam"])
    left = {name: flipped[name] for name in ("rewards", "old_values", "mask")} | again._asdict()

    step = Step(Dump([write(tmp_path / "left.safetensors", left, params)]))
    assert "padded on the left" in step.padding() and "right" not in step.padding()
    assert [finding.verdict for finding in audit(step)] == ["right"]

    mask = left.pop("mask")
    attention = torch.cat([torch.ones(6, 3, dtype=torch.bool), mask], 1)
    path = write(tmp_path / "a.safetensors", left | {"attention_mask": attention.long()}, params)
    assert audited(path)["advantages"].verdict == "right"
    tokens = torch.where(mask, 5, 0)
    path = write(
        tmp_path / "p.safetensors", left | {"tokens": torch.cat([torch.ones(6, 1).long(), tokens], 1)}, params | {"pad_id": 0}
    )
    assert audited(path)["advantages"].verdict == "right"
    assert audited(path, mask_from="all")["advantages"].verdict == "wrong"


def test_a_score_after_the_last_token_makes_the_chain_longer(tmp_path):
    from goldenppo.reference import experience

    tensors, params = step_of()
    span = experience(
        *(tensors[name] for name in ("old_logprobs", "ref_logprobs", "old_values", "scores", "mask")),
        kl_coef=params["kl_coef"], gamma=params["gamma"], lam=params["lam"], score_at="first_pad", whitening="inside",
    )  # fmt: skip
    keep = {name: tensors[name] for name in ("old_logprobs", "ref_logprobs", "old_values", "scores", "mask")}

    found = audited(write(tmp_path / "d.safetensors", keep | span._asdict(), params))

    assert verdicts(found) == {"rewards": "right", "experience": "right"}
    assert found["experience"].variant["score_at"] == ["first_pad"] and found["experience"].variant["whitening"] == ["inside"]


def test_ranks_are_joined_and_their_own_losses_are_checked_on_each(tmp_path):
    tensors, params = step_of()
    paths = []
    for rank, rows in enumerate((slice(0, 4), slice(4, 6))):
        part = {name: tensor[rows] for name, tensor in tensors.items() if tensor.dim()}
        own = policy_loss(part["logprobs"], part["old_logprobs"], part["advantages"], part["mask"], clip_low=0.2, clip_high=0.2)
        paths.append(write(tmp_path / f"rank{rank}.safetensors", part | {"policy_loss": own.loss}, params))

    step, findings = audit_ranks(paths, None, None, [])

    assert step.rows == 6
    assert [(finding.edge.name, finding.place) for finding in findings] == [
        *((name, "") for name in ("kl", "rewards", "advantages")),
        ("policy_loss", paths[0]),
        ("policy_loss", paths[1]),
    ]
    assert {finding.verdict for finding in findings} == {"right"}


@pytest.mark.parametrize(("weights", "verdict"), [("tokens", "right"), ("equal", "wrong")])
def test_micro_batches_make_up_the_reported_loss(tmp_path, weights, verdict):
    tensors, params = step_of()
    recorder, parts = Recorder(tmp_path / "d.safetensors", **params), []
    names = ("logprobs", "old_logprobs", "advantages", "mask")
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        part = [tensors[name][rows] for name in names]
        loss = policy_loss(*part, clip_low=0.2, clip_high=0.2).loss
        parts.append((loss, part[3].sum()))
        recorder.record(micro_policy_loss=loss, micro_tokens=part[3].sum(), **dict(zip(names, part, strict=True)))
    counts = torch.stack([count for _, count in parts]).double() if weights == "tokens" else torch.ones(3).double()
    recorder.record(policy_loss=(torch.stack([loss for loss, _ in parts]) * counts).sum() / counts.sum())

    found = audited(str(recorder.save()))

    assert found["micro_policy_loss"].verdict == verdict
    if verdict == "wrong":
        assert "the mean of the micro-batches" in found["micro_policy_loss"].reason


def test_the_recorder_joins_rows_and_leaves_no_half_file(tmp_path):
    recorder = Recorder(tmp_path / "d.safetensors", gamma=1.0, score_clip=None)
    recorder.record(rewards=torch.ones(2, 3), policy_loss=0.5)
    recorder.record(rewards=torch.ones(1, 4))
    with pytest.raises(ValueError, match="micro_policy_loss"):
        recorder.record(policy_loss=0.25)
    path = recorder.save()

    assert load_file(path)["rewards"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    with safe_open(path, "pt") as file:
        assert json.loads(file.metadata()["params"]) == {"gamma": 1.0, "score_clip": None}
    assert [item.name for item in tmp_path.iterdir()] == ["d.safetensors"]


def test_what_computes_in_sixteen_bits_is_said(tmp_path):
    tensors, params = step_of(dtype=torch.float32)
    narrow = {name: tensors[name].bfloat16() for name in ("rewards", "old_values")}
    chain = gae(*narrow.values(), tensors["mask"], gamma=params["gamma"], lam=params["lam"])
    dump = {name: tensor.float() for name, tensor in narrow.items()} | {"mask": tensors["mask"]}
    dump |= {name: tensor.bfloat16().float() for name, tensor in chain._asdict().items()}

    found = audited(write(tmp_path / "d.safetensors", dump, params))

    assert found["advantages"].verdict == "wrong" and found["advantages"].report.precision == "computes-in-bfloat16"


def _broken(tmp_path, kind: str) -> str:
    tensors, params = step_of()
    path = tmp_path / f"{kind}.safetensors"
    if kind == "missing":
        return str(path)
    if kind == "empty":
        path.write_bytes(b"")
        return str(path)
    if kind == "rows":
        tensors["returns"] = tensors["returns"][:3]
    if kind == "nan":
        tensors["rewards"] = tensors["rewards"].clone()
        tensors["rewards"][0, 1] = torch.nan
    if kind == "no-token":
        tensors["mask"] = torch.zeros_like(tensors["mask"])
    if kind == "no-names":
        tensors = {"a/b": torch.ones(2)}
    if kind == "strange":
        tensors = {"x1": torch.ones(2), "x2": torch.ones(2, 2)}
    if kind == "complex":
        tensors["rewards"] = tensors["rewards"].to(torch.complex64)
    if kind == "word":
        params = params | {"gamma": "high"}
    write(path, tensors, params)
    if kind == "params":
        save_file(tensors, path, {"params": "{"})
    if kind == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    return str(path)


@pytest.mark.parametrize(
    ("kind", "code", "says"),
    [
        ("missing", 2, "there is no file"),
        ("empty", 2, "no whole safetensors file"),
        ("truncated", 2, "no whole safetensors file"),
        ("rows", 2, "different numbers of rows: .*returns has 3"),
        ("nan", 1, r"rewards is not finite at row 0, position 1, which counts"),
        ("no-token", 4, "the mask has no token"),
        ("no-names", 2, "no tensor under a name of its own"),
        ("strange", 4, "nothing could be checked"),
        ("complex", 2, "rewards has dtype C64"),
        ("params", 2, "the metadata's `params` is no JSON object"),
        ("word", 2, "the parameter gamma is 'high'; expected a number or null"),
    ],
)
def test_what_is_no_dump_gets_a_sentence(tmp_path, capsys, kind, code, says):
    import re

    assert main(["audit", _broken(tmp_path, kind)]) == code
    captured = capsys.readouterr()
    assert re.search(says, " ".join((captured.out + captured.err).split()))
    assert "Traceback" not in captured.err


def test_the_json_document_and_the_table(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a long path would not fit a line
    tensors, params = step_of()
    path = write(Path("d.safetensors"), tensors, params)

    assert main(["audit", path, "--json", str(tmp_path / "out.json")]) == 0
    assert all(len(line) <= 80 for line in capsys.readouterr().out.split("\n"))
    document = json.loads((tmp_path / "out.json").read_text())
    assert {edge["edge"]: edge["verdict"] for edge in document["edges"]} == dict.fromkeys(EDGES, "right")
    assert main(["audit", path, "--edge", "nothing"]) == 2
    assert main(["audit"]) == 2
    assert main(["audit", path, "--json", str(tmp_path / "no" / "out.json")]) == 2
