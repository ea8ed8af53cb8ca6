"""`goldenppo check`, from the command line to the exit code, on adapters written here."""

import json
import textwrap

import pytest

from goldenppo.conformance.cli import main

RIGHT = """
import torch
def policy_loss(logprobs, old_logprobs, advantages, mask, *, clip_low, clip_high):
    r = (logprobs - old_logprobs).exp()
    loss = torch.maximum(-advantages * r, -advantages * r.clamp(1 - clip_low, 1 + clip_high))
    return (loss * mask).sum() / mask.sum().to(loss.dtype)
"""


@pytest.fixture
def check(tmp_path, capsys):
    """Writes an adapter file, checks it, and returns exit code and output."""

    def run(text, *flags):
        path = tmp_path / "my_trainer.py"
        path.write_text(textwrap.dedent(text))
        code = main(["check", str(path), *flags])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


def test_a_right_file_conforms_and_its_aggregation_is_identified(check):
    code, output = check(RIGHT)

    assert code == 0
    assert "aggregation: token_mean" in output
    assert all(len(line) <= 80 for line in output.split("\n"))


def test_a_wrong_number_fails_and_the_bug_is_named(check):
    code, output = check(RIGHT.replace("torch.maximum", "torch.minimum"))

    assert code == 1
    assert "matches pl-min-for-max" in output


def test_the_plain_unmasked_function_is_checked_in_five_lines(check):
    """A function that knows no mask is held against the cases in which every position counts."""
    code, output = check(
        """
        import torch
        def compute_actor_loss(log_probs_new, log_probs_old, advantages, clip_range=0.2):
            ratio = torch.exp(log_probs_new - log_probs_old)
            clipped = torch.clamp(ratio, 1 - clip_range, 1 + clip_range)
            return -torch.min(ratio * advantages, clipped * advantages).mean()

        def policy_loss(logprobs, old_logprobs, advantages, *, clip):
            return compute_actor_loss(logprobs, old_logprobs, advantages, clip_range=clip)
        """
    )

    assert code == 0
    assert "takes no mask" in output


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("def policy_loss(:", 4, "is not valid Python"),
        ("import no_such_library", 4, "does not import"),
        ("raise RuntimeError('on purpose')", 4, "RuntimeError: on purpose"),
        ("x = 1", 4, "nothing was compared"),
        ("def policy_loss(logprobs): return 0", 4, "takes 1 of the 4 inputs"),
        ("from goldenppo.reference import gae", 4, "comes from goldenppo"),
        (RIGHT + "MASK = 'boolean'", 4, "MASK is 'boolean'"),
        (RIGHT + "VARIANTS = {'policy_loss': {'aggregation': 'mean'}}", 4, "it can be token_mean"),
        (RIGHT.replace("return ", "return logprobs.new_zeros(3) + "), 1, "shape (3,), expected ()"),
        (RIGHT.replace("return ", "return float('nan') * "), 1, "nan"),
        (RIGHT.replace("return ", "raise ValueError('inside') #"), 1, "raised ValueError: inside"),
        (RIGHT + "    return torch.tensor(1)", 0, "conforms"),
        (RIGHT.replace("return (loss", "return 1 + 0 * int(0) or (loss"), 1, "int"),
        (
            RIGHT.replace("return ", "return torch.zeros((), dtype=torch.int64) if True else "),
            1,
            "expected a floating-point dtype",
        ),
        (RIGHT.replace("logprobs - old", "logprobs.detach() - old"), 1, "gradient dead"),
    ],
)
def test_a_faulty_file_gets_one_clear_sentence(check, text, code, says):
    got, output = check(text)

    assert (got, says in output) == (code, True), output
    assert "Traceback" not in output


def test_usage_errors_end_2(capsys):
    for words in (["no-such-adapter"], ["missing.py"], ["reference", "--op", "nope"], ["reference", "--device", "cuda:99"]):
        assert main(["check", *words]) == 2
        assert capsys.readouterr().err.startswith("goldenppo: ")


def test_an_unwritable_output_is_refused_before_anything_runs(check):
    code, output = check("raise SystemExit('must not run')", "--json", "/no/such/folder/r.json")

    assert code == 2
    assert "there is no folder" in output


def test_a_declared_variant_that_is_not_implemented_fails(check):
    code, _ = check(RIGHT + "VARIANTS = {'policy_loss': {'aggregation': 'seq_mean_token_mean'}}")

    assert code == 1


def test_without_gradients_when_the_adapter_says_so(check):
    code, output = check(RIGHT.replace("logprobs - old", "logprobs.detach() - old") + "GRADIENTS = {'policy_loss': False}")

    assert code == 0
    assert "gradients not offered" in output


def test_a_float32_result_at_float64_is_coarse(check):
    code, output = check(RIGHT.replace("logprobs - old_logprobs", "logprobs.float() - old_logprobs.float()"))

    assert code == 0
    assert "agrees to float32 accuracy at float64" in output


def test_bfloat16_inside_is_named(check):
    text = RIGHT.replace("logprobs - old_logprobs", "logprobs.bfloat16() - old_logprobs.bfloat16()")
    code, output = check(text.replace("return ", "loss = loss.bfloat16(); return "))

    assert code == 1
    assert "computes-in-bfloat16" in output


def test_the_result_file_follows_its_schema(check, tmp_path):
    import jsonschema

    from goldenppo.conformance.cases import folder

    check(RIGHT.replace("torch.maximum", "torch.minimum"), "--json", str(tmp_path / "r.json"))
    result = json.loads((tmp_path / "r.json").read_text())
    schema = json.loads((folder("conformance") / "result.schema.json").read_text())

    jsonschema.validate(result, schema)
    assert result["exit_code"] == 1
    assert "pl-min-for-max" in result["ops"][3]["matches"]


def test_an_adapter_in_another_process_gives_the_same_verdict(check):
    import sys

    code, output = check(RIGHT.replace("torch.maximum", "torch.minimum"), "--python", sys.executable, "--op", "policy_loss")

    assert code == 1
    assert "matches pl-min-for-max" in output


def test_an_answer_that_is_offered_under_other_values_only_is_asked_for(check):
    """k3 comes only with its clamp: the cases that the clamp does not move have to be run under it."""
    text = """
        from goldenppo.adapters import Unsupported
        def kl_penalty(logprobs, ref_logprobs, *, estimator, clamp):
            if estimator not in ("k1", "k3") or (estimator == "k3") != (clamp == 10):
                raise Unsupported("k1, and k3 with its clamp")
            x = ref_logprobs - logprobs
            return -x if estimator == "k1" else (x.exp() - 1 - x).clamp(-10, 10)
    """
    code, output = check(text)
    assert code == 0, output

    code, output = check(text.replace("x.exp() - 1 - x", "(-x).exp() - 1 + x"))
    assert code == 1 and "matches kl-k3-direction-swapped" in output
