"""The exact oracle: against published numbers, against its own differences, against the torch reference."""

import inspect
import itertools
import math
import random
import time
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import yaml

from goldenppo import reference
from goldenppo.reference import exact
from goldenppo.reference.exact.number import NAN, Number, kinks, lift, mp, parameter, span, to_float

TABLE = yaml.safe_load((Path(exact.__file__).parents[2] / "spec" / "ops.yaml").read_text())
OPS = TABLE["ops"]
K = 4
ROUNDOFF = {torch.float64: (2.0**-53, 5e-324), torch.float32: (2.0**-24, 2.0**-149)}
B, T, V = 4, 6, 5


# --- cases: inputs exact in bfloat16, poison wherever the mask is False -------------------------------------


def dyadic(rng, scale=1.0):
    return round(rng.gauss(0, scale) * 32) / 32


def grid(rng, rows=B, columns=T, scale=1.0, shift=0.0):
    return [[dyadic(rng, scale) + shift for _ in range(columns)] for _ in range(rows)]


def logprobs(rng, near=None):
    if near is None:
        return [[-abs(x) - 0.25 for x in row] for row in grid(rng)]
    return [[x + dyadic(rng, 0.3) for x in row] for row in near]


def ragged(rng, holes=False, empty=True):
    mask = [[t < n for t in range(T)] for n in (T, 3, 1, 0 if empty else 4)]
    if holes:
        mask[0][2] = mask[0][3] = mask[1][0] = False
    return mask


def scores(rng, count=B):
    return [dyadic(rng, 2.0) for _ in range(count)]


def policy_case(rng):
    old = logprobs(rng)
    params = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": rng.choice([None, 1.25]), "horizon": 7}
    return (logprobs(rng, old), old, grid(rng), ragged(rng, holes=True)), params


def value_case(rng):
    params = {"clip": rng.choice([None, 0.3, 0.3]), "horizon": 7}
    return (grid(rng), grid(rng), grid(rng), ragged(rng, holes=True)), params


def shaped_case(rng):
    ref = logprobs(rng)
    params = {"kl_coef": 0.15, "score_clip": rng.choice([None, 1.3]), "eos_penalty": 0.7}
    params["ended"] = [True, False, True, False]
    return (logprobs(rng, ref), ref, scores(rng), ragged(rng, holes=True)), params


def experience_case(rng):
    ref = logprobs(rng)
    params = {"kl_coef": 0.15, "gamma": 0.97, "lam": 0.9, "score_clip": rng.choice([None, 1.3])}
    return (logprobs(rng, ref), ref, grid(rng), scores(rng), ragged(rng, holes=True)), params


def tokens(rng, rows, columns, count=V):
    return [[rng.randrange(1, count) for _ in range(columns)] for _ in range(rows)]


def token_loss_case(rng):
    chosen = tokens(rng, B, T)
    rejected = [list(row) for row in chosen]
    rejected[0][2], rejected[1][0], rejected[2][4] = 7, 8, 9
    chosen[0][4:] = [0, 0]
    rejected[1][3:] = [0, 0, 0]
    return (grid(rng), grid(rng), chosen, rejected), {"pad_id": 0}


CASES = {
    "token_logprobs": lambda rng: (
        ([grid(rng, T, V, 2.0) for _ in range(2)], tokens(rng, 2, T)),
        {"temperature": 0.7},
    ),
    "entropy": lambda rng: (([grid(rng, T, V, 2.0) for _ in range(2)],), {"temperature": 0.7}),
    "ratio": lambda rng: ((logprobs(rng), logprobs(rng), ragged(rng)), {}),
    "policy_loss": policy_case,
    "value_loss": value_case,
    "kl_penalty": lambda rng: ((logprobs(rng), logprobs(rng)), {}),
    "shaped_rewards": shaped_case,
    "gae": lambda rng: ((grid(rng), grid(rng), ragged(rng, holes=True)), {"gamma": 0.97, "lam": 0.9}),
    "whiten": lambda rng: ((grid(rng, shift=0.5), ragged(rng, holes=True)), {}),
    "experience": experience_case,
    "aggregate": lambda rng: ((grid(rng), ragged(rng, holes=True)), {"horizon": 7}),
    "reward_model_loss": lambda rng: (
        (scores(rng), scores(rng)),
        {"margin": rng.choice([None, [0.25, 0.0, 1.5, 0.5]])},
    ),
    "reward_model_token_loss": token_loss_case,
    "end_score": lambda rng: (
        (grid(rng), [[True] * T, [False] * 2 + [True] * 4, [True] * 3 + [False] * 3, [True] + [False] * 5]),
        {},
    ),
    "kl_controller": lambda rng: (
        ([abs(x) for x in scores(rng, 5)],),
        {"init_coef": 0.13, "target": 1.7, "horizon": 100, "batch_size": 24},
    ),
    "total_loss": lambda rng: (
        tuple(scores(rng, 4)),
        {"vf_coef": 0.13, "entropy_coef": 0.017, "kl_loss_coef": 0.05},
    ),
    "dpo_loss": lambda rng: (
        tuple(scores(rng) for _ in range(4)),
        {"beta": 0.3, "label_smoothing": rng.choice([None, 0.1])},
    ),
}


def combinations(op):
    """Yield every combination of the axes that move an output of the op."""
    axes = list(dict.fromkeys(axis for output in OPS[op]["outputs"].values() for axis in output["axes"]))
    for values in itertools.product(*(TABLE["axes"][axis] for axis in axes)):
        yield dict(zip(axes, values, strict=True))


def cases(op, seed, count=3):
    """Yield inputs and keywords of seeded cases over all combinations of the op's axes."""
    for variant in combinations(op):
        rng = random.Random(f"{op} {seed}")
        for _ in range(count):
            inputs, params = CASES[op](rng)
            if variant.get("aggregation") == "plain_mean":  # only where every position counts
                inputs = (*inputs[:-1], [[True] * T for _ in range(B)])
            yield inputs, {**params, **variant}


# --- comparison ---------------------------------------------------------------------------------------------


def units(got, want, dtype=torch.float64):
    """Return the error of one element in units of u·gauge + s; the law allows K of them."""
    target = to_float(want)
    if math.isnan(target) or math.isnan(got):
        return 0.0 if math.isnan(target) and math.isnan(got) else math.inf
    u, s = ROUNDOFF[dtype]
    return max(0.0, abs(got - target) - u * abs(target)) / (u * want.gauge + s)


def worst(got, want, dtype=torch.float64):
    """Return the largest error over two nested lists; what the oracle leaves open (None) is not compared."""
    if want is None:
        return 0.0
    if isinstance(want, Number):
        return units(got, want, dtype)
    assert len(got) == len(want)
    return max((worst(g, w, dtype) for g, w in zip(got, want, strict=True)), default=0.0)


def tensors(op, inputs, dtype):
    """Return the inputs as tensors, NaN at masked slots, that require a gradient where one is an answer."""
    specs = OPS[op]["inputs"]
    kinds = {"float": dtype, "bool": torch.bool, "int": torch.int64}
    made = {
        name: torch.tensor(value, dtype=kinds[spec.get("kind", "float")])
        for (name, spec), value in zip(specs.items(), inputs, strict=True)
    }
    for name, tensor in made.items():
        if op not in ("shaped_rewards", "experience") and "mask" in made and tensor.is_floating_point():
            tensor[~made["mask"]] = math.nan
        if name in graded(op):
            tensor.requires_grad_()
    return list(made.values())


def graded(op):
    return [name for output in OPS[op]["outputs"].values() for name in output.get("gradients", [])]


def call_reference(op, inputs, keywords, dtype):
    """Return the reference's outputs and gradients as the oracle names them."""
    given = tensors(op, inputs, dtype)
    arrays = {
        name: torch.tensor(value, dtype=torch.bool if name == "ended" else dtype)
        for name, value in keywords.items()
        if isinstance(value, list)
    }
    function = getattr(reference, op)
    accepted = inspect.signature(function).parameters
    result = function(*given, **{name: v for name, v in (keywords | arrays).items() if name in accepted})
    names = list(OPS[op]["outputs"])
    outputs = dict(zip(names, result if isinstance(result, tuple) else (result,), strict=True))
    answers = {name: value.detach().tolist() for name, value in outputs.items()}
    if graded(op):
        outputs["loss"].backward()
        for name, tensor in zip(OPS[op]["inputs"], given, strict=True):
            if tensor.requires_grad:
                answers[f"grad_{name}"] = tensor.grad.tolist()
    return answers


@pytest.mark.parametrize("dtype", ROUNDOFF, ids=["float64", "float32"])
@pytest.mark.parametrize("op", OPS)
def test_reference_agrees_with_the_oracle(op, dtype):
    largest = {}
    started, calls = time.perf_counter(), 0
    for inputs, keywords in cases(op, seed=1):
        want = getattr(exact, op)(*inputs, **keywords)
        got = call_reference(op, inputs, keywords, dtype)
        assert set(want) == set(got)
        for name in want:
            error = worst(got[name], want[name], dtype)
            assert error <= K, f"{op} {name} {keywords}: {error:.3g} tolerance units"
            largest[name] = max(largest.get(name, 0.0), error)
        calls += 1
    report = ", ".join(f"{name} {error:.2f}" for name, error in largest.items())
    print(f"{op} {dtype}: {report} ({calls} calls, {time.perf_counter() - started:.2f} s)")


# --- the oracle by itself -----------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [op for op in OPS if graded(op)])
def test_gradients_are_the_differences_of_the_loss(op):
    """A central difference over 2^-70 has an error of about 2^-140, far below float64."""
    step = Fraction(1, 2**70)
    for inputs, keywords in cases(op, seed=2, count=1):
        result = getattr(exact, op)(*inputs, **keywords)
        for name in graded(op):
            position = list(OPS[op]["inputs"]).index(name)
            for path in paths(inputs[position]):
                loss = [
                    getattr(exact, op)(*replaced(inputs, position, path, sign * step), **keywords)["loss"].value
                    for sign in (1, -1)
                ]
                difference = (fine(loss[0]) - fine(loss[1])) / (2 * fine(step))
                gradient = fine(at(result[f"grad_{name}"], path).value)
                assert abs(difference - gradient) <= 1e-25, (keywords, path)


def fine(value):
    return mp.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def paths(x):
    """Return the index path of a few leaves, spread over the array."""
    if not isinstance(x, list):
        return [()]
    leaves = [(i, *rest) for i, item in enumerate(x) for rest in (paths_all(item))]
    return leaves[:: max(1, len(leaves) // 8)]


def paths_all(x):
    return [(i, *rest) for i, item in enumerate(x) for rest in paths_all(item)] if isinstance(x, list) else [()]


def at(x, path):
    return at(x[path[0]], path[1:]) if path else x


def moved(x, path, step):
    if not path:
        return lift(x).value + step
    return [moved(item, path[1:], step) if i == path[0] else item for i, item in enumerate(x)]


def replaced(inputs, position, path, step):
    return [moved(x, path, step) if i == position else x for i, x in enumerate(inputs)]


@pytest.mark.parametrize("op", OPS)
def test_a_wrong_value_fails(op):
    """Ten tolerances off, an answer is out, and so is an op with one parameter off by 1e-9."""
    inputs, keywords = next(cases(op, seed=3))
    want = getattr(exact, op)(*inputs, **keywords)
    for rows in want.values():
        for number in leaves(rows):
            assert units(to_float(number), number) == 0
            off = to_float(number) + 10 * K * (2.0**-53 * number.gauge + 2.0**-53 * number.size + 5e-324)
            assert units(off, number) > K
    names = ("temperature", "gamma", "kl_coef", "beta", "vf_coef", "init_coef")
    for name in (name for name in names if name in keywords):
        other = getattr(exact, op)(*inputs, **{**keywords, name: keywords[name] * (1 + 1e-9)})
        pairs = [(leaves(other[output]), leaves(want[output])) for output in want]
        assert any(units(to_float(a), b) > K for x, y in pairs for a, b in zip(x, y, strict=True))


def leaves(rows):
    if isinstance(rows, list):
        return [number for row in rows for number in leaves(row)]
    return [] if rows is None else [rows]


@pytest.mark.parametrize("op", OPS)
def test_signature_is_that_of_the_op_table(op):
    signature = inspect.signature(getattr(exact, op)).parameters
    positional = [p.name for p in signature.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    keywords = {p.name: p.default for p in signature.values() if p.kind is p.KEYWORD_ONLY}
    assert positional == list(OPS[op]["inputs"])
    axes = {axis for output in OPS[op]["outputs"].values() for axis in output["axes"]}
    assert set(keywords) - {"sides"} == axes | set(OPS[op]["params"])
    for axis in axes:
        assert keywords[axis] == TABLE["axes"][axis][0]
    for name, spec in OPS[op]["params"].items():
        free = spec.get("optional") or "needed_by" in spec
        assert keywords[name] is (None if free else inspect.Parameter.empty)


@pytest.mark.parametrize("op", OPS)
def test_every_answer_has_a_finite_bound_and_a_range(op):
    for inputs, keywords in cases(op, seed=4, count=1):
        for rows in getattr(exact, op)(*inputs, **keywords).values():
            for number in leaves(rows):
                low, high = span(number)
                assert math.isfinite(number.gauge)
                assert low >= 1e-20
                assert 0 <= high < 1e20


# --- published numbers --------------------------------------------------------------------------------------


def floats(rows):
    if isinstance(rows, list):
        return [floats(row) for row in rows]
    return None if rows is None else to_float(rows)


def test_gae_by_hand():
    """Two responses of five and three tokens, padding poisoned; worked out in rationals beforehand."""
    rewards = [[-0.125, 0.0625, -0.03125, 0.0, 1.5], [0.25, -0.0625, -0.75, -32.0, 48.0]]
    values = [[0.5, 0.25, -0.125, 0.375, 0.75], [1.0, 0.5, 0.25, 64.0, -96.0]]
    mask = [[True] * 5, [True] * 3 + [False] * 2]
    result = floats(exact.gae(rewards, values, mask, gamma=0.99, lam=0.95)["advantages"])
    assert result[0] == pytest.approx([0.6336161452859842, 1.0750836207187497, 1.47403893749999, 1.072875, 0.75])
    assert result[1][:3] == pytest.approx([-1.43579775, -1.2555, -1.0])
    assert result[1][3:] == [None, None]


@pytest.mark.parametrize(("score_at", "want"), [("last_token", [0.82675, 0.765, 0.7]), ("first_pad", [0.799675, 0.7365, 0.67])])
def test_experience_by_score_position(score_at, want):
    """huggingface/trl#3750: V = 0.1 … 0.4, the third token ends the answer, gamma 1, lambda 0.95."""
    same = [[-1.0] * 4]
    case = (same, same, [[0.1, 0.2, 0.3, 0.4]], [1.0], [[True] * 3 + [False]])
    result = exact.experience(*case, kl_coef=0.1, gamma=1.0, lam=0.95, score_at=score_at)
    assert floats(result["advantages"])[0][:3] == pytest.approx(want)


@pytest.mark.parametrize(("gaps", "want"), [("skip", 0.485), ("zero", 0.43575), ("cut", -0.5)])
def test_gae_over_a_gap(gaps, want):
    """OpenRLHF/OpenRLHF#1015: a token, a tool's answer, a token with the reward."""
    rows = ([[0.0, 0.0, 1.0]], [[0.5, 9.0, 0.7]], [[True, False, True]])
    result = exact.gae(*rows, gamma=1.0, lam=0.95, gaps=gaps)
    assert floats(result["advantages"])[0][0] == pytest.approx(want)


@pytest.mark.parametrize(
    ("aggregation", "want"),
    [
        ("token_mean", 2.5),
        ("token_sum", 10.0),
        ("seq_mean_token_mean", 2.0),
        ("seq_mean_token_sum", 5.0),
        ("seq_mean_token_sum_norm", 0.5),
    ],
)
def test_aggregation_by_hand(aggregation, want):
    mask = [[True, False, False], [True] * 3]
    result = exact.aggregate([[1.0, 9.0, 9.0], [3.0] * 3], mask, horizon=10, aggregation=aggregation)
    assert to_float(result["value"]) == want


def test_policy_loss_by_hand():
    """A = −1 and r = 5 at clip 0.2: 5, and 3 under dual clip 3, where no gradient is left."""
    d = math.log(5)
    case = ([[d]], [[0.0]], [[-1.0]], [[True]])
    plain = exact.policy_loss(*case, clip_low=0.2, clip_high=0.2)
    dual = exact.policy_loss(*case, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    assert to_float(plain["loss"]) == pytest.approx(5)
    assert to_float(plain["grad_logprobs"][0][0]) == pytest.approx(5)
    assert to_float(dual["loss"]) == 3
    assert (dual["grad_logprobs"][0][0].value, dual["grad_logprobs"][0][0].gauge) == (0, 0)


def test_value_loss_by_hand():
    """V_old 0.5, V 1, R 1, clip 0.2: 0.045, twice that for the clipped error alone, 0 unclipped."""
    case = ([[1.0]], [[0.5]], [[1.0]], [[True]])
    assert to_float(exact.value_loss(*case, clip=0.2)["loss"]) == pytest.approx(0.045)
    clipped = exact.value_loss(*case, clip=0.2, form="clipped_only", factor="one")
    assert to_float(clipped["loss"]) == pytest.approx(0.09)
    assert to_float(exact.value_loss(*case)["loss"]) == 0


def test_kl_controller_by_hand():
    case = {
        "init_coef": 0.1,
        "target": 6.0,
        "horizon": 10000,
        "batch_size": 256,
        "controller": "proportional",
    }
    assert floats(exact.kl_controller([12.0], **case)["coef"]) == pytest.approx([0.100512])


# --- edges --------------------------------------------------------------------------------------------------


def test_an_edge_has_two_derivatives():
    """V exactly at V_old + clip: the bound holds on one side only, if R lies beyond it."""
    rows = ([[1.0, 1.0, 0.5]], [[0.75] * 3], [[2.0, 0.5, 2.0]], [[True] * 3])
    result = exact.value_loss(*rows, clip=0.25, aggregation="token_sum", factor="one", sides=True)
    low, high = (floats(result[f"grad_values_{side}"])[0] for side in ("low", "high"))
    assert (low, high) == ([-2.0, 1.0, -3.0], [0.0, 1.0, -3.0])


def test_an_edge_of_the_ratio_has_two_derivatives():
    edge = math.log1p(0.25)
    rows = ([[edge, edge, 0.5]], [[0.0] * 3], [[2.0, -2.0, 2.0]], [[True] * 3])
    result = exact.policy_loss(*rows, clip_low=0.25, clip_high=0.25, aggregation="token_sum", sides=True)
    low, high = (floats(result[f"grad_logprobs_{side}"])[0] for side in ("low", "high"))
    assert low == pytest.approx([-2.5, 2.5, 0.0])
    assert high == pytest.approx([0.0, 2.5, 0.0])


def test_kinks_see_the_edge_and_not_the_open_band():
    def smallest(d, A):
        with kinks() as found:
            exact.policy_loss([[d]], [[0.0]], [[A]], [[True]], clip_low=0.25, clip_high=0.25)
        return min(found)

    assert smallest(math.log1p(0.25), 1.0) < 1e-15
    assert smallest(0.0, 1.0) > 2**-5  # r = 1: both branches of the maximum are one function
    assert smallest(0.125, 0.0) > 2**-5  # no advantage: both branches are 0


@pytest.mark.parametrize(("denominator", "want"), [("n", math.nan), ("n+1e-8", 0.0), ("max(n,1)", 0.0)])
def test_a_mean_of_nothing(denominator, want):
    got = to_float(exact.aggregate([[1.0, 2.0]], [[False, False]], denominator=denominator)["value"])
    assert got == want or (math.isnan(got) and math.isnan(want))


def test_empty_rows_take_part_in_a_mean_over_rows_or_not():
    mask = [[True, False], [False, False]]
    for empty_rows, want in (("excluded", 2.0), ("counted", 1.0)):
        got = exact.aggregate([[2.0, 9.0]] * 2, mask, aggregation="seq_mean_token_mean", empty_rows=empty_rows)
        assert to_float(got["value"]) == want


def test_one_token_has_no_unbiased_variance():
    assert exact.whiten([[3.0]], [[True]])["whitened"][0][0].value is None
    assert to_float(exact.whiten([[3.0]], [[True]], variance="biased")["whitened"][0][0]) == 0


def test_a_loss_of_nothing_is_undefined_and_has_no_gradient():
    result = exact.policy_loss([[-1.0]], [[-1.0]], [[1.0]], [[False]], clip_low=0.2, clip_high=0.2)
    assert result["loss"] is NAN or result["loss"].value is None
    assert result["grad_logprobs"][0][0].value == 0


def test_a_masked_position_is_never_read():
    nan = math.nan
    result = exact.value_loss([[1.0, nan]], [[0.5, nan]], [[1.0, nan]], [[True, False]], clip=0.2)
    assert to_float(result["loss"]) == pytest.approx(0.045)


def test_a_horizon_is_asked_for():
    with pytest.raises(ValueError, match="horizon is none"):
        exact.aggregate([[1.0]], [[True]], aggregation="seq_mean_token_sum_norm")


def test_parameters_widen_the_bound():
    assert exact.kl_controller([1.0], init_coef=0.5, target=1.0, horizon=2, batch_size=1)["coef"][0].gauge == 0.5
    assert parameter(0.5).gauge == 0.5
