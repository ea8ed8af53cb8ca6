"""The deviations and their metadata: complete, distinct, none a variant, with the numbers of the reports."""

import inspect
import itertools
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml

import goldenppo.reference as reference
import goldenppo.spec as spec
from goldenppo.reference.deviations import deviations

SPEC = Path(spec.__file__).parent
TABLE = yaml.safe_load((SPEC / "ops.yaml").read_text(encoding="utf-8"))
METADATA = yaml.safe_load((SPEC / "deviations.yaml").read_text(encoding="utf-8"))
OPS = TABLE["ops"]
ENTRIES = METADATA["deviations"]
NAN = float("nan")

# ids of public reports, by where deviations.yaml accounts for them
REPORTS = {"deviations": 81, "links_of_variants": 18, "precision": 8, "not_op_expressible": 67}


def doubles(rows):
    return torch.tensor(rows, dtype=torch.float64)


def bools(rows):
    return torch.tensor(rows, dtype=torch.bool)


# ------------------------------------------------------------------------------------------------ metadata


def reports():
    return {
        "deviations": [bug for entry in ENTRIES.values() for bug in entry.get("bugs", [])],
        "links_of_variants": [bug for entry in METADATA["links_of_variants"] for bug in entry["bugs"]],
        "precision": [bug for entry in METADATA["precision"].values() for bug in entry["bugs"]],
        "not_op_expressible": [entry["id"] for entry in METADATA["not_op_expressible"]],
    }


def test_every_report_is_accounted_for_exactly_once():
    found = reports()
    assert {place: len(ids) for place, ids in found.items()} == REPORTS
    every = [bug for ids in found.values() for bug in ids]
    assert sum(REPORTS.values()) == len(set(every)) == 174


@pytest.mark.parametrize("op", OPS)
def test_functions_and_entries_match(op):
    assert list(deviations(op)) == [name for name, entry in ENTRIES.items() if entry["op"] == op]


def test_ids_are_unique_and_those_of_a_known_op():
    names = [name for op in OPS for name in deviations(op)]
    assert len(names) == len(set(names)) == len(ENTRIES)
    assert all(entry["op"] in OPS for entry in ENTRIES.values())


@pytest.mark.parametrize("name", ENTRIES)
def test_entry_is_complete(name):
    entry = ENTRIES[name]
    optional = {"bugs", "textbook", "links", "seen"}
    assert set(entry) - optional == {"op", "title", "computed", "should", "effect", "fix", "level"}
    assert all(isinstance(entry[field], str) and entry[field] for field in set(entry) - optional)
    assert len(entry["title"]) <= 100
    assert entry["level"] in ("must", "should", "robust")
    assert ("bugs" in entry) != (entry.get("textbook") is True)
    assert ("bugs" in entry) == ("seen" in entry)
    assert all(link.startswith("https://") for link in entry.get("links", []))
    assert "bugs" not in entry or entry["links"]


@pytest.mark.parametrize("name", ENTRIES)
def test_function_has_the_signature_of_its_op(name):
    op = ENTRIES[name]["op"]
    function = deviations(op)[name]
    assert inspect.signature(function) == inspect.signature(getattr(reference, op))
    assert function.__name__ == name.replace("-", "_")
    assert 1 <= len(inspect.getdoc(function).splitlines()) <= 6


def test_variant_links_name_a_value_of_an_axis():
    axes = {**TABLE["axes"], "op": list(OPS)}
    for entry in METADATA["links_of_variants"]:
        assert entry["value"] in axes[entry["axis"]]
        assert entry["links"]


def test_remaining_reports_have_a_tier_and_a_reason():
    for entry in METADATA["not_op_expressible"]:
        assert entry["tier"] in ("run", "invariances", "out-of-reach")
        assert entry["reason"].endswith(".")
        assert entry["links"]
    assert list(METADATA["precision"]) == ["computes-in-bfloat16", "computes-in-float16"]


# -------------------------------------------------------------------------------------------- the batches
#
# Tame ones (`must`), tails and constants (`should`), NaN at masked slots and nothing at all (`robust`).

MASK = bools(
    [
        [1, 1, 1, 1, 1, 1, 1],
        [1, 1, 0, 1, 1, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [0, 1, 1, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 0],
    ]
)
FULL = torch.ones(3, 4, dtype=torch.bool)


def poisoned(x, mask, keep_slot=False, nan=False):
    """Put large numbers, or NaN, into masked slots; `keep_slot` spares the one after the last token."""
    wild = torch.full_like(x, NAN) if nan else -40 - 7 * torch.rand(x.shape, generator=GENERATOR).to(x.dtype)
    if keep_slot:
        mask = mask | (torch.nn.functional.pad(mask, (1, -1)) & ~(mask.flip(1).cumsum(1).flip(1) > 0))
    return torch.where(mask, x, wild)


GENERATOR = torch.Generator().manual_seed(20)
SCORES = doubles([1.63, -0.42, -2.27, 0.71, 1.19])


def uniform(low, high, *shape):
    return low + (high - low) * torch.rand(*shape, generator=GENERATOR, dtype=torch.float64)


def normal(*shape):
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


def policy_batch(mask, nan=False):
    old = -uniform(0.5, 3.0, *mask.shape)
    d, advantages = uniform(-0.9, 0.9, *mask.shape), 1.5 * normal(*mask.shape)
    if len(mask) > 2:  # one token on each side of each bound, for both signs of the advantage
        d[0, :4], advantages[0, :4] = doubles([0.8, -0.7, 0.6, -0.5]), doubles([-1.3, -0.9, 1.1, 1.7])
    return (*(poisoned(x, mask, nan=nan) for x in (old + d, old, advantages)), mask)


def value_batch(mask, nan=False):
    old, returns = normal(*mask.shape), normal(*mask.shape)
    values = old + uniform(-0.8, 0.8, *mask.shape)
    return (*(poisoned(x, mask, nan=nan) for x in (values, old, returns)), mask)


def reward_batch(mask, nan=False):
    ref = -uniform(0.5, 3.0, *mask.shape)
    new = ref + uniform(-0.9, 0.9, *mask.shape)
    pair = tuple(poisoned(x, mask, keep_slot=not nan, nan=nan) for x in (new, ref))
    return (*pair, SCORES.clone(), mask)


def gae_batch(mask, nan=False):
    return (*(poisoned(normal(*mask.shape), mask, nan=nan) for _ in range(2)), mask)


def experience_batch(mask):
    new, ref, scores, _ = reward_batch(mask)
    return (new, ref, poisoned(normal(*mask.shape), mask, keep_slot=True), scores, mask)


def token_batch():
    chosen = torch.tensor([[5, 6, 7, 8, 9, 0, 0, 0], [5, 6, 3, 0, 0, 0, 0, 0], [4, 4, 2, 7, 1, 3, 0, 0]])
    rejected = torch.tensor([[5, 6, 2, 0, 0, 0, 0, 0], [5, 6, 4, 7, 0, 0, 0, 0], [4, 4, 2, 7, 1, 3, 0, 0]])
    return (normal(3, 8), normal(3, 8), chosen, rejected)


SURROGATE = {"clip_low": 0.2, "clip_high": 0.28, "horizon": 11.0}
SPAN = {"kl_coef": 0.3, "gamma": 0.97, "lam": 0.9}
ENDED = bools([1, 0, 1, 0, 1])
ATTENDED = bools(
    [
        [1, 1, 1, 1, 1, 1],
        [1, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 1, 1],
        [0, 1, 1, 1, 1, 0],
        [1, 1, 0, 1, 0, 0],
    ]
)
WEIGHTS = {"vf_coef": 0.7, "entropy_coef": 0.03, "kl_loss_coef": 0.11}
STEPS = {"init_coef": 0.2, "target": 6.0, "horizon": 1000, "batch_size": 32}


def batches():
    """Return {op: [(level, inputs, params)]}."""
    empty = torch.zeros(2, 3, dtype=torch.bool)
    tiny = doubles([[0.1, 0.3, -0.2], [0.25, 0.05, 0.4]]) * 1e-5
    steep = doubles([700.0, -800.0, 900.0, 2.0])
    flat = torch.zeros(4, dtype=torch.float64)
    one_pair = torch.tensor([[3, 4, 5]]), torch.tensor([[3, 4, 6]])
    return {
        "token_logprobs": [
            (
                "must",
                (normal(2, 5, 7), torch.tensor([[0, 3, 6, 1, 2], [5, 5, 2, 0, 4]])),
                {"temperature": 0.7},
            )
        ],
        "entropy": [("must", (normal(2, 3, 5),), {"temperature": 0.7})],
        "ratio": [("must", (*policy_batch(MASK)[:2], MASK), {})],
        "policy_loss": [
            ("must", policy_batch(MASK), SURROGATE),
            ("must", policy_batch(MASK), {**SURROGATE, "dual_clip": 1.2}),
            ("must", policy_batch(FULL), SURROGATE),
            ("should", policy_batch(MASK), SURROGATE),
            ("robust", policy_batch(MASK, nan=True), SURROGATE),
            ("robust", policy_batch(empty), SURROGATE),
        ],
        "value_loss": [
            ("must", value_batch(MASK), {"clip": 0.2, "horizon": 11.0}),
            ("must", value_batch(MASK), {"horizon": 11.0}),
            ("must", value_batch(FULL), {"clip": 0.2, "horizon": 11.0}),
            ("should", value_batch(MASK), {"clip": 0.2, "horizon": 11.0}),
            ("robust", value_batch(MASK, nan=True), {"clip": 0.2, "horizon": 11.0}),
        ],
        "kl_penalty": [
            ("must", (-uniform(0.1, 3.0, 3, 5), -uniform(0.1, 3.0, 3, 5)), {}),
            ("should", (doubles([[-0.5, -13.0]]), doubles([[-12.75, -0.25]])), {}),
        ],
        "shaped_rewards": [
            ("must", reward_batch(MASK), {"kl_coef": 0.3}),
            ("must", reward_batch(MASK), {"kl_coef": 0.3, "score_clip": 1.1}),
            ("must", reward_batch(MASK), {"kl_coef": 0.3, "eos_penalty": 0.8, "ended": ENDED}),
        ],
        "gae": [
            ("must", gae_batch(MASK), {"gamma": 0.97, "lam": 0.9}),
            ("must", gae_batch(FULL), {"gamma": 0.97, "lam": 0.9}),
            ("robust", gae_batch(MASK, nan=True), {"gamma": 0.97, "lam": 0.9}),
        ],
        "whiten": [
            ("must", (poisoned(normal(*MASK.shape) + 0.9, MASK), MASK), {}),
            ("should", (tiny, torch.ones(2, 3, dtype=torch.bool)), {}),
            ("should", (tiny + 1e4, torch.ones(2, 3, dtype=torch.bool)), {}),
            ("robust", (poisoned(normal(*MASK.shape), MASK, nan=True), MASK), {}),
        ],
        "experience": [
            ("must", experience_batch(MASK), SPAN),
            ("must", experience_batch(MASK), {**SPAN, "score_clip": 1.1}),
        ],
        "aggregate": [
            ("must", (poisoned(normal(*MASK.shape), MASK), MASK), {"horizon": 11.0}),
            ("must", (normal(*FULL.shape), FULL), {"horizon": 11.0}),
            ("robust", (poisoned(normal(*MASK.shape), MASK, nan=True), MASK), {"horizon": 11.0}),
        ],
        "reward_model_loss": [
            ("must", (normal(4), normal(4)), {}),
            ("must", (normal(4), normal(4)), {"margin": uniform(0.2, 1.7, 4)}),
            ("should", (steep, flat), {"margin": uniform(0.2, 1.7, 4)}),
        ],
        "reward_model_token_loss": [
            ("must", token_batch(), {"pad_id": 0}),
            ("should", (doubles([[0.0, 0.0, -900.0]]), doubles([[0.0, 0.0, 1.0]]), *one_pair), {"pad_id": 0}),
        ],
        "end_score": [("must", (normal(5, 6), ATTENDED), {})],
        "kl_controller": [("must", (doubles([7.1, 5.3, 9.5, 1.2, 6.4, 14.0]),), STEPS)],
        "total_loss": [("must", tuple(doubles(x) for x in (0.37, 1.91, 2.43, 0.58)), WEIGHTS)],
        "dpo_loss": [
            ("must", tuple(-uniform(5, 9, 4) for _ in range(4)), {"beta": 0.3}),
            ("must", tuple(-uniform(5, 9, 4) for _ in range(4)), {"beta": 0.3, "label_smoothing": 0.15}),
            ("should", tuple(-uniform(5, 9, 4) for _ in range(4)), {"beta": 0.3}),
            ("should", (4 * steep, flat, flat, flat), {"beta": 0.3}),
        ],
    }


BATCHES = batches()


# ------------------------------------------------------------------------------ evaluation of one function


def settings(op):
    """Return the default setting of the op's axes and every setting that differs from it on one axis."""
    axes = {axis: TABLE["axes"][axis] for out in OPS[op]["outputs"].values() for axis in out["axes"]}
    default = {axis: values[0] for axis, values in axes.items()}
    if op == "kl_controller":
        default["controller"] = "proportional"
    if "whitening" in default:
        default["whitening"] = "inside"  # where variance and epsilon act
    if "log_ratio_clamp" in default:
        axes["log_ratio_clamp"] = ["none"]  # 20 moves nothing at |d| below 20
    single = [default, *({**default, axis: value} for axis, values in axes.items() for value in values)]
    if op == "shaped_rewards":
        single += [{**default, "level": "sequence", "score_at": "first_pad"}]
    return [setting for i, setting in enumerate(single) if setting not in single[:i]]


def full_settings(op, output):
    """Return every setting of the axes that move an output."""
    axes = {axis: TABLE["axes"][axis] for axis in OPS[op]["outputs"][output]["axes"]}
    axes.pop("log_ratio_clamp", None)
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def allowed(setting, inputs):
    """Say whether every position counts where the setting reads no mask."""
    return setting.get("aggregation") != "plain_mean" or bool(inputs[-1].all())


def evaluated(op, function, level, inputs, params, setting):
    """Return {output: tensor}: each output followed by the gradients that are an answer at this level."""
    names = list(OPS[op]["inputs"])
    leaves = [x.clone().requires_grad_() if x.is_floating_point() else x.clone() for x in inputs]
    result = function(*leaves, **params, **setting)
    outputs = result._asdict() if hasattr(result, "_asdict") else {next(iter(OPS[op]["outputs"])): result}
    answers = {}
    for output, value in outputs.items():
        wanted = list(OPS[op]["outputs"][output].get("gradients", []))
        if level == "should" and wanted:
            wanted += OPS[op].get("constants", [])
        parts = [value.detach().flatten()]
        if wanted:
            parts += [gradient(value, leaves[names.index(name)]) for name in wanted]
        answers[output] = torch.cat(parts)
    return answers


def gradient(loss, leaf):
    """Return d loss / d leaf, all 1e300 where the graph is cut."""
    if not loss.requires_grad:
        return torch.full_like(leaf, 1e300).flatten().detach()
    (found,) = torch.autograd.grad(loss.sum(), leaf, retain_graph=True, allow_unused=True)
    return (torch.zeros_like(leaf) if found is None else found).flatten()


def compared(op, output, inputs, setting):
    """Return which elements of an answer are compared, or all of them."""
    if OPS[op]["outputs"][output]["shape"] != ["B", "T"] or "mask" not in OPS[op]["inputs"]:
        return slice(None)
    mask = inputs[-1]
    if output == "rewards":
        nothing = torch.zeros(mask.shape)
        ones = torch.ones(len(mask))
        how = {"kl_coef": 0.0, "score_at": setting["score_at"]}
        mask = mask | (reference.shaped_rewards(nothing, nothing, ones, mask, **how) > 0)
    return mask.flatten()


def same(got, want, tolerance):
    return got.shape == want.shape and torch.allclose(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)


@cache
def right_answers(op, index):
    """Return {output: [(setting, compared elements, answer)]} of every variant for a batch."""
    level, inputs, params = BATCHES[op][index]
    function = getattr(reference, op)
    answers = {}
    for output in OPS[op]["outputs"]:
        answers[output] = [
            (where := compared(op, output, inputs, setting), answer[where])
            for setting in full_settings(op, output)
            if allowed(setting, inputs)
            for answer in [evaluated(op, function, level, inputs, params, setting)[output]]
        ]
    return answers


@cache
def answers_of(name):
    """Return [(op batch, setting, {output: tensor})] of a deviation over every batch and setting."""
    op = ENTRIES[name]["op"]
    function = deviations(op)[name]
    return [
        (index, evaluated(op, function, level, inputs, params, setting))
        for index, (level, inputs, params) in enumerate(BATCHES[op])
        for setting in settings(op)
        if allowed(setting, inputs)
    ]


def acts(name, level, tolerance):
    """Say whether, in some batch of this level, an output of the deviation is that of no variant."""
    op = ENTRIES[name]["op"]
    return any(
        not any(
            same(got[where] if got.shape == answer_shape(op, index, output) else got, want, tolerance)
            for where, want in right_answers(op, index)[output]
        )
        for index, answers in answers_of(name)
        if BATCHES[op][index][0] == level
        for output, got in answers.items()
    )


@cache
def answer_shape(op, index, output):
    level, inputs, params = BATCHES[op][index]
    return evaluated(op, getattr(reference, op), level, inputs, params, settings(op)[0])[output].shape


@pytest.mark.parametrize("name", ENTRIES)
def test_deviation_is_none_of_the_variants(name):
    lowest = ENTRIES[name]["level"]
    for level in ("must", "should", "robust"):
        if level == lowest:
            # at float32's tolerance, as the cases are judged
            assert acts(name, level, tolerance=1e-5)
            return
        assert not acts(name, level, tolerance=1e-7), f"{name} acts on {level} cases already"


@pytest.mark.parametrize("op", OPS)
def test_no_two_deviations_of_an_op_are_equal(op):
    vectors = {name: torch.cat([torch.cat(list(answers.values())) for _, answers in answers_of(name)]) for name in deviations(op)}
    for one, other in itertools.combinations(vectors, 2):
        assert not same(vectors[one], vectors[other], 1e-9), f"{one} and {other} give the same numbers: merge them"


# Deviations whose mistake is to read masked slots; no other may be moved by what stands there.
READS_MASKED = {
    "agg-holes-counted",
    "agg-length-squared",
    "agg-mask-ignored",
    "agg-mask-in-denominator-only",
    "agg-mask-one-late",
    "ex-holes-visited",
    "ex-kl-mask-one-late",
    "ex-kl-not-masked",
    "ex-mask-ignored",
    "ex-next-value-unmasked",
    "ex-pad-bootstrap",
    "ex-value-kept-after-end",
    "ex-values-one-late",
    "gae-holes-visited",
    "gae-mask-ignored",
    "gae-next-value-unmasked",
    "gae-pad-bootstrap",
    "gae-pad-rewards",
    "gae-value-kept-after-end",
    "gae-values-one-late",
    "pl-holes-counted",
    "pl-mask-ignored",
    "pl-mask-in-denominator-only",
    "pl-mask-one-late",
    "pl-metrics-over-padding",
    "sr-kl-mask-one-late",
    "sr-kl-not-masked",
    "vl-holes-counted",
    "vl-mask-ignored",
    "vl-mask-in-denominator-only",
    "vl-mask-one-late",
    "wh-over-padding",
}


@pytest.mark.parametrize("name", [n for n in ENTRIES if "mask" in OPS[ENTRIES[n]["op"]]["inputs"]])
def test_masked_slots_are_read_only_where_that_is_the_mistake(name):
    op = ENTRIES[name]["op"]
    moved = False
    for level, inputs, params in BATCHES[op]:
        mask = inputs[-1]
        other = [x + (0.5 + 0.3 * i) * ~mask if x.shape == mask.shape else x for i, x in enumerate(inputs[:-1])]
        other.append(mask)
        for setting in settings(op):
            if not allowed(setting, inputs) or level == "robust" or setting.get("score_at") == "first_pad_with_kl":
                continue
            if op == "experience" and setting["score_at"] != "last_token":
                continue
            function = deviations(op)[name]
            before = evaluated(op, function, level, inputs, params, setting)
            after = evaluated(op, function, level, other, params, setting)
            for output, answer in before.items():
                where = compared(op, output, inputs, setting)
                moved |= not same(after[output][where], answer[where], 1e-12)
    assert moved == (name in READS_MASKED)


# -------------------------------------------------------------------------- the numbers of the public reports


def zeros(*shape):
    return torch.zeros(*shape, dtype=torch.float64)


def logs(rows):
    return doubles(rows).log()


def pair(d):
    """Return scores of one pair with chosen − rejected = d, in float32."""
    return torch.tensor([d]), torch.zeros(1)


CLIP = {"clip_low": 0.2, "clip_high": 0.2}
UNDISCOUNTED = {"gamma": 1.0, "lam": 0.95}
NO_WEIGHTS = {"vf_coef": 0.0, "entropy_coef": 0.0, "kl_loss_coef": 0.0}
HOLE = bools([[1, 0, 1]])
TRAILING = bools([[1, 1, 0]])
OBSERVED = (doubles([[0, 0, 1]]), doubles([[0.5, 9, 0.7]]), HOLE)
LOGITS = doubles([[[2, 0], [0, 0]]])
LENGTH_4 = bools([[1, 0, 0, 1, 0, 0, 1, 0, 0, 1]])
ROWS = (doubles([[1, 0, 0], [3, 3, 3]]), bools([[1, 0, 0], [1, 1, 1]]))

# (report, deviation, inputs, keywords, output, right, wrong): right is None where the report's right number
# needs more than the op; only the elements at tokens are compared
# fmt: off
REVEALS = [
    ("trl-grpo-temperature-missing", "lp-temperature-missing", (LOGITS, torch.tensor([[0, 0]])),
     {"temperature": 0.5}, None, [-0.018150], [-0.126928]),
    ("openrlhf-train-logprob-without-temperature", "lp-temperature-missing", (LOGITS, torch.tensor([[0, 1]])),
     {"temperature": 0.5}, None, [-4.01815], [-2.12693]),
    ("verl-megatron-entropy-after-in-place-logprob", "ent-from-overwritten-logits", (doubles([[[2, 0]]]),),
     {"temperature": 1.0}, None, [0.3653], [0.6078]),
    ("trl-ratio-extra-axis-broadcast", "pl-ratio-broadcast", (logs([[1.1, 0.9]]), zeros(1, 2),
     doubles([[1, -1]]), bools([[1, 1]])), CLIP, "loss", [-0.1], [0.0]),
    ("trl-cispo-branches-swapped", "pl-clipped-weight-branch", (doubles([[-1.0]]), doubles([[-1.0]]) -
     logs([[1.5]]), doubles([[1]]), bools([[1]])), CLIP, "loss", [-1.2], [0.2]),
    ("rlinf-dual-clip-parameter-swallowed-by-kwargs", "pl-dual-clip-ignored", (logs([[10]]), zeros(1, 1),
     doubles([[-1]]), bools([[1]])), {**CLIP, "dual_clip": 3.0}, "loss", [3], [10]),
    ("torchrl-advantage-normalised-in-one-branch", "pl-advantage-whitened-in-one-branch", (zeros(1, 2),
     zeros(1, 2), doubles([[-3, -1]]), bools([[1, 1]])), CLIP, "loss", None, [2]),
    ("trl-liger-ignores-tool-mask", "pl-holes-counted", (zeros(1, 3), zeros(1, 3), doubles([[-1, -9, -1]]),
     HOLE), CLIP, "loss", [1], [11 / 3]),
    ("trl-unmasked-ratio-inf-times-zero", "pl-mask-multiplied", (torch.tensor([[0.0, 100.0]]),
     torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]), bools([[1, 0]])), CLIP, "loss", [-1], [NAN]),
    ("openrlhf-ppo-kl-is-minus-ratio", "pl-approx-kl-minus-ratio", (zeros(1, 1), zeros(1, 1), zeros(1, 1),
     bools([[1]])), CLIP, "approx_kl", [0], [-1]),
    ("trl-ppo-diagnostics-unmasked", "pl-approx-kl-over-padding", (doubles([[0.2, -0.4, 0, 0]]), zeros(1, 4),
     zeros(1, 4), bools([[1, 1, 0, 0]])), {**CLIP, "approx_kl": "k2"}, "approx_kl", [0.05], [0.025]),
    ("torchtune-approx-kl-and-ratio-over-padding", "pl-approx-kl-over-padding", (doubles([[0.2, 0.2, 0, 0]]),
     zeros(1, 4), zeros(1, 4), bools([[1, 1, 0, 0]])), {**CLIP, "approx_kl": "k2"}, "approx_kl", [0.02],
     [0.01]),
    ("torchrl-clip-fraction-is-mean-ratio", "pl-clip-fraction-is-mean-ratio", (logs([[1.5, 1.0]]),
     zeros(1, 2), doubles([[1, 1]]), bools([[1, 1]])), CLIP, "clip_fraction", [0.5], [1.1]),
    ("lhpd-value-clip-around-itself", "vl-clip-around-new-value", (doubles([[1]]), doubles([[0.5]]),
     doubles([[1]]), bools([[1]])), {"clip": 0.2}, "loss", [0.045], [0]),
    ("cleanrl-value-clipped-around-zero", "vl-clip-around-zero", (doubles([[0.5]]), doubles([[0.1]]),
     zeros(1, 1), bools([[1]])), {"clip": 0.2, "form": "clipped_only", "factor": "one"}, "loss", [0.09],
     [0.04]),
    ("cleanrl-unreduced-value-loss", "vl-unreduced", (doubles([[2, 0]]), zeros(1, 2), zeros(1, 2),
     bools([[1, 1]])), {}, "loss", [1], [2, 0]),
    ("roll-critic-clipfrac-is-the-loss", "vl-clip-fraction-is-the-loss", (doubles([[3, 3]]), zeros(1, 2),
     zeros(1, 2), bools([[1, 1]])), {}, "clip_fraction", [0], [9]),
    ("coati-k3-direction-swapped", "kl-k3-direction-swapped", (zeros(1, 1), doubles([[-1]])),
     {"estimator": "k3"}, None, [0.367879], [0.718282]),
    ("colossalchat-kl-metric-k3-direction", "kl-k3-swapped-and-guarded", (zeros(1, 2), doubles([[-1, -12]])),
     {"estimator": "k3"}, None, [0.367879, 11.000006], [0.718282, -12]),
    ("torchrl-klpen-kl-against-itself", "kl-against-itself", (logs([[0.8]]), logs([[0.5]])), {}, None,
     [0.470004], [0]),
    ("skyrl-probability-difference-is-a-ratio", "kl-probability-ratio", (zeros(1, 1), zeros(1, 1)),
     {"estimator": "abs"}, None, [0], [1]),
    ("colossalchat-score-on-every-action-token", "sr-score-on-every-token", (zeros(1, 3), zeros(1, 3),
     doubles([1]), bools([[1, 1, 1]])), {"kl_coef": 0.0}, None, [0, 0, 1], [1, 1, 1]),
    ("tunix-score-truncated-to-integer", "sr-score-truncated-to-integer", (zeros(2, 1), zeros(2, 1),
     doubles([0.7, -1.6]), bools([[1], [1]])), {"kl_coef": 0.0}, None, [0.7, -1.6], [0, -1]),
    ("slime-ppo-kl-reward-wrong-sign-and-scale", "sr-kl-neither-scaled-nor-negated", (doubles([[0.2, 0.3]]),
     zeros(1, 2), doubles([1]), bools([[1, 1]])), {"kl_coef": 0.1}, None, [-0.02, 0.97], [0.2, 1.3]),
    ("trlx-kl-mask-off-by-one", "sr-kl-mask-one-late", (doubles([[0.1, 0.2, 5.0]]), zeros(1, 3), doubles([0]),
     TRAILING), {"kl_coef": 1.0, "level": "sequence"}, None, [0, -0.3], [0, -5.3]),
    ("trl-missing-eos-penalty-ignores-stop-token", "sr-penalty-on-every-row", (zeros(1, 2), zeros(1, 2),
     doubles([0.8]), bools([[1, 1]])), {"kl_coef": 0.0, "eos_penalty": 1.0, "ended": bools([1])}, None,
     [0, 0.8], [0, -0.2]),
    ("areal-no-eos-inferred-from-padded-width", "sr-ended-inferred-from-width", (zeros(2, 2), zeros(2, 2),
     doubles([1, 1]), bools([[1, 0], [1, 1]])),
     {"kl_coef": 0.0, "eos_penalty": 0.0, "ended": bools([1, 1]), "missing_eos": "replace"}, None, [1, 0, 1],
     [1, 0, 0]),
    ("slime-reinforce-pp-kl-not-masked", "ex-kl-not-masked", (doubles([[0.1, 5, 0.1]]), zeros(1, 3),
     zeros(1, 3), doubles([1]), HOLE), {"kl_coef": 0.1, "gamma": 1.0, "lam": 1.0}, "returns", [0.98, 0.99],
     [0.48, 0.99]),
    ("ds-gae-bootstraps-past-eos", "gae-mask-ignored", (doubles([[0, 1, 0, 0]]),
     doubles([[0.5, 0.6, 0.9, 0.9]]), bools([[1, 1, 0, 0]])), UNDISCOUNTED, "advantages", [0.48, 0.40],
     [0.56336, 0.48775]),
    ("miles-gae-over-masked-tokens", "gae-mask-ignored", (doubles([[0, 0, 0, 1]]), zeros(1, 4),
     bools([[1, 1, 0, 0]])), UNDISCOUNTED, "advantages", None, [0.857375, 0.9025]),
    ("roll-gae-bootstraps-from-masked-values", "gae-pad-bootstrap", (doubles([[0, 1, 0]]),
     doubles([[0, 0, 100]]), TRAILING), UNDISCOUNTED, "advantages", [0.95, 1.0], [5.7, 6.0]),
    ("trl-minillm-pad-leaks-into-advantage", "gae-pad-rewards", (doubles([[1.5, 1, 2, 2]]), zeros(1, 4),
     bools([[1, 1, 0, 0]])), {"gamma": 1.0, "lam": 1.0}, "returns", [2.5, 1], [6.5, 5]),
    ("verl-value-kept-after-eos", "gae-value-kept-after-end", (doubles([[0, 1, 0]]),
     doubles([[0.5, 0.6, 2.0]]), TRAILING), UNDISCOUNTED, "advantages", [0.48, 0.4], [0.575, 0.5]),
    ("verl-gae-runs-through-observation-tokens", "gae-holes-visited", OBSERVED, UNDISCOUNTED, "advantages",
     [0.485, 0.3], [0.88575, 0.3]),
    ("tunix-gae-next-value-zeroed-at-mask", "gae-next-value-zeroed-at-gap", OBSERVED, UNDISCOUNTED,
     "advantages", [0.485, 0.3], [-0.215, 0.3]),
    ("rlhf-book-advantage-from-immediate-reward", "gae-immediate-reward", (doubles([[0, 1]]), zeros(1, 2),
     bools([[1, 1]])), {"gamma": 1.0, "lam": 1.0}, "advantages", [1, 1], [0, 1]),
    ("sb3-gae-bootstraps-from-previous-observation", "gae-bootstraps-own-value", (doubles([[1]]),
     doubles([[2]]), bools([[1]])), UNDISCOUNTED, "advantages", None, [1]),
    ("roll-values-one-step-late", "gae-values-one-late", (zeros(1, 3), doubles([[-10, -20, -30]]), TRAILING),
     {"gamma": 0.0, "lam": 1.0}, "advantages", [10, 20], [20, 30]),
    ("torchtune-whiten-adds-the-mean-back", "gae-whitening-keeps-mean", (doubles([[2, 4, 9]]), zeros(1, 3),
     bools([[1, 1, 1]])), {"gamma": 0.0, "lam": 1.0, "whitening": "inside"}, "advantages",
     [-0.832, -0.277, 1.109], [4.168, 4.723, 6.109]),
    ("verl-vectorised-group-std-floor", "wh-variance-floored", (doubles([[1.00000, 1.00001]]),
     bools([[1, 1]])), {}, None, None, [-0.0050, 0.0050]),
    ("openrlhf-logexp-margin-sign-flipped", "rm-margin-sign", pair(0.0), {"margin": torch.ones(1)}, None,
     [1.313262], [0.313262]),
    ("openrlhf-logexp-loss-overflows-and-drops-margin", "rm-log-exp-without-margin", pair(0.0),
     {"margin": torch.ones(1)}, None, [1.3133], [0.6931]),
    ("openrlhf-logexp-loss-overflows-and-drops-margin", "rm-log-exp-without-margin", pair(-100.0), {}, None,
     [100], [torch.inf]),
    ("ds-rm-log-sigmoid-overflow", "rm-log-of-sigmoid", pair(-90.0), {}, None, [90], [torch.inf]),
    ("coati-pairwise-log-of-sigmoid", "rm-log-of-sigmoid", pair(-100.0), {}, None, [100], [torch.inf]),
    ("trlx-rm-loss-divided-inside-loop", "rm-divided-inside-loop", (zeros(4), zeros(4) +
     doubles(torch.e - 1).log()), {}, None, [1], [0.33203125]),
    ("torchrl-reward-loss-divided-by-skipped-pairs", "rmt-identical-pair-counted", (doubles([[0, 1], [0, 0]]),
     zeros(2, 2), torch.tensor([[3, 4], [3, 4]]), torch.tensor([[3, 5], [3, 4]])), {"pad_id": 0}, None, None,
     [0.1566]),
    ("transformers-pool-first-pad-minus-one", "end-first-pad-minus-one",
     (doubles([[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]), bools([[1, 0, 1, 1, 0], [0, 1, 1, 0, 0]])), {}, None,
     [3, 2], [0, 4]),
    ("sffd-reward-index-left-padded-query", "end-first-pad-minus-one", (doubles([[0, 1, 2, 3, 4]]),
     bools([[0, 1, 1, 1, 0]])), {}, None, [3], [4]),
    ("transformers-pool-count-minus-one", "end-count-minus-one", (doubles([[0, 1, 2, 3]]),
     bools([[0, 0, 1, 1]])), {}, None, [3], [1]),
    ("llamafactory-score-before-eos", "end-one-early", (doubles([[0.1, 0.2, 0.9]]), bools([[1, 1, 1]])), {},
     None, [0.9], [0.2]),
    ("coati-reward-mean-over-all-positions", "end-mean-without-last-column", (doubles([[0, 0, 4, 7, 7]]),
     bools([[1, 1, 1, 0, 0]])), {}, None, [4], [2.75]),
    ("torchrl-reward-pad-token-hard-coded", "end-last-column", (doubles([[0.1, 0.9, -1, -2]]),
     bools([[1, 1, 0, 0]])), {}, None, [0.9], [-2]),
    ("sb3-sampled-entropy-sign", "tl-entropy-added", (zeros(()), zeros(()), doubles(2.0), zeros(())),
     {**NO_WEIGHTS, "entropy_coef": 1.0}, None, [-2], [2]),
    ("verl-kl-loss-subtracted", "tl-kl-subtracted", (zeros(()), zeros(()), zeros(()), doubles(0.5)),
     {**NO_WEIGHTS, "kl_loss_coef": 0.1}, None, [0.05], [-0.05]),
    ("trl-dpo-precomputed-ref-ignored", "dpo-policy-is-reference", tuple(doubles([x]) for x in
     (-10, -12, -11, -11)), {"beta": 0.1}, None, [0.59814], [0.69315]),
    ("torchrl-padding-in-loss-reduction", "agg-mask-ignored", (doubles([[1, 1, 7]]), TRAILING), {}, None, [1],
     [3]),
    ("skyrl-entropy-includes-padding", "agg-mask-ignored", (doubles([[1, 1, 0.2, 0.2]]),
     bools([[1, 1, 0, 0]])), {}, None, [1], [0.6]),
    ("trl-entropy-counts-sentinel-logprob", "agg-mask-ignored", (doubles([[0.5, 0.7, -1, -1, -1]]),
     bools([[1, 1, 0, 0, 0]])), {"aggregation": "token_sum"}, None, [1.2], [-1.8]),
    ("trl-truncated-mask-denominator", "agg-mask-in-numerator-only", (zeros(2, 4) + 1,
     bools([[1, 1, 1, 1], [0, 0, 0, 0]])), {}, None, [1], [0.5]),
    ("roll-token-mean-numerator-unmasked", "agg-mask-in-denominator-only", (doubles([[1, 100], [1, -50]]),
     bools([[1, 0], [1, 0]])), {}, None, [1], [26]),
    ("areal-sequence-advantage-includes-padding", "agg-mask-in-denominator-only", (-doubles([[1, 1, 10, 10]]),
     bools([[1, 1, 0, 0]])), {}, None, [-1], [-11]),
    ("slime-per-token-loss-counts-response-length", "agg-holes-in-denominator", (zeros(1, 10) + 2, LENGTH_4),
     {}, None, [2], [0.8]),
    ("trl-luspo-mask-as-length", "agg-length-squared", (doubles([[1, 1, 5, 5]]), bools([[1, 1, 0, 0]])),
     {"aggregation": "seq_mean_token_sum"}, None, [2], [6]),
    ("roll-seq-modes-divide-by-length-twice", "agg-row-mean-divided-twice", (zeros(1, 2) + 2,
     bools([[1, 1]])), {"aggregation": "seq_mean_token_mean"}, None, [2], [1]),
    ("verl-sum-norm-mode-missing-sequence-mean", "agg-sum-norm-without-row-mean", (zeros(2, 3) + 1,
     bools([[1, 1, 1], [1, 1, 1]])), {"aggregation": "seq_mean_token_sum_norm", "horizon": 3.0}, None, [1],
     [2]),
    ("verl-nan-outside-mask", "agg-mask-multiplied", (doubles([[1, NAN]]), bools([[1, 0]])), {}, None, [1],
     [NAN]),
]
# fmt: on

# (report, op, inputs, keywords, axis, output, right value of the axis, its number, reported value and number)
# fmt: off
VARIANT_REVEALS = [
    ("trl-policykl-sign", "policy_loss", (doubles([[-1.2]]), doubles([[-1.0]]), zeros(1, 1), bools([[1]])),
     CLIP, "approx_kl", "approx_kl", "k1", [0.2], "minus_k1", [-0.2]),
    ("openrlhf-ppo-kl-from-clamped-ratio", "policy_loss", (doubles([[-31.0]]), doubles([[-1.0]]), zeros(1, 1),
     bools([[1]])), CLIP, "log_ratio_clamp", "approx_kl", "none", [30], 20, [20]),
    ("verl-value-loss-lost-half", "value_loss", (doubles([[1]]), doubles([[1]]), zeros(1, 1), bools([[1]])),
     {}, "factor", "loss", "half", [0.5], "one", [1.0]),
    ("nemorl-reward-kl-ignores-configured-clamps", "kl_penalty", (doubles([[-1]]), doubles([[-16]])), {},
     "clamp", None, "none", [15], 10, [10]),
    ("trl-reported-kl-ignores-penalty-type", "kl_penalty", (doubles([[0.5, -0.7]]), zeros(1, 2)), {},
     "estimator", None, "abs", [0.5, 0.7], "k1", [0.5, -0.7]),
    ("openrlhf-gae-decays-across-observation-tokens", "gae", OBSERVED, UNDISCOUNTED, "gaps", "advantages",
     "skip", [0.485, 0.3], "zero", [0.43575, 0.3]),
    ("ds-score-one-past-last-action", "experience", (zeros(1, 3), zeros(1, 3), doubles([[0.5, 0.6, 0.9]]),
     doubles([1]), TRAILING), {**UNDISCOUNTED, "kl_coef": 0.1}, "score_at", "advantages", "last_token",
     [0.48, 0.40], "first_pad_with_kl", [0.47525, 0.395]),
    ("verl-token-sum-mode-divides-by-length", "aggregate", ROWS, {}, "aggregation", None,
     "seq_mean_token_sum", [5], "seq_mean_token_mean", [2]),
    ("verl-loss-agg-mode-not-forwarded", "aggregate", ROWS, {}, "aggregation", None, "seq_mean_token_mean",
     [2], "token_mean", [2.5]),
    ("trlx-whiten-variance-depends-on-world", "whiten", (doubles([[1, 3]]), bools([[1, 1]])), {}, "variance",
     None, "unbiased", [-0.70711, 0.70711], "biased", [-1, 1]),
]
# fmt: on


def at_tokens(function, op, inputs, keywords, output):
    """Return an output as a list, only at tokens where there is a mask."""
    result = function(*inputs, **keywords)
    result = getattr(result, output) if output else result
    mask = inputs[-1]
    if "mask" in OPS[op]["inputs"] and result.shape == mask.shape and output != "loss":
        result = result[mask]
    return result.flatten().tolist()


def about(numbers):
    """Compare with a report's numbers, which have four to seven digits."""
    return pytest.approx(numbers, rel=1e-4, abs=6e-4 if max(map(abs, numbers)) > 1 else 6e-5, nan_ok=True)


@pytest.mark.parametrize("reveal", REVEALS, ids=[f"{reveal[0]}-{i}" for i, reveal in enumerate(REVEALS)])
def test_number_of_a_report_comes_out(reveal):
    report, name, inputs, keywords, output, right, wrong = reveal
    op = ENTRIES[name]["op"]
    assert report in ENTRIES[name]["bugs"]
    assert at_tokens(deviations(op)[name], op, inputs, keywords, output) == about(wrong)
    if right is not None:
        assert at_tokens(getattr(reference, op), op, inputs, keywords, output) == about(right)


@pytest.mark.parametrize("reveal", VARIANT_REVEALS, ids=[reveal[0] for reveal in VARIANT_REVEALS])
def test_number_of_a_report_is_that_of_a_variant(reveal):
    report, op, inputs, keywords, axis, output, right_value, right, value, number = reveal
    links = {bug: (entry["axis"], entry["value"]) for entry in METADATA["links_of_variants"] for bug in entry["bugs"]}
    assert links[report] == (axis, value)
    function = getattr(reference, op)
    assert at_tokens(function, op, inputs, {**keywords, axis: right_value}, output) == about(right)
    assert at_tokens(function, op, inputs, {**keywords, axis: value}, output) == about(number)


def test_one_pass_without_temperature_shows_in_ratio_and_kl():
    inputs, tempered = (LOGITS, torch.tensor([[0, 0]])), {"temperature": 0.5}
    raw = deviations("token_logprobs")["lp-temperature-missing"](*inputs, **tempered)
    right = reference.token_logprobs(*inputs, **tempered)
    counts = bools([[1]])
    assert reference.ratio(raw, right, counts).item() == pytest.approx(0.896929, rel=1e-5)  # NeMo-RL
    assert reference.ratio(right, raw, counts).item() == pytest.approx(1.114915, rel=1e-5)  # AReaL
    assert reference.kl_penalty(raw, right).item() == pytest.approx(-0.108778, rel=1e-5)  # tunix


def test_gradients_of_reports():
    new = doubles([[-1.0]]).requires_grad_()
    inputs = (new, doubles([[-1.0]]), doubles([[1.0]]), bools([[1]]))
    dead = deviations("policy_loss")["pl-ratio-of-itself"](*inputs, **CLIP).loss
    right = reference.policy_loss(*inputs, **CLIP).loss
    assert dead.item() == right.item() == -1
    assert torch.autograd.grad(dead, new)[0].item() == 0
    assert torch.autograd.grad(right, new)[0].item() == -1

    nothing = (new, doubles([[-1.0]]), doubles([[1.0]]), bools([[0]]))
    assert not deviations("policy_loss")["pl-empty-batch-detached"](*nothing, **CLIP).loss.requires_grad


def test_only_the_file_of_the_op_is_imported():
    assert deviations("entropy").keys() == {name for name, entry in ENTRIES.items() if entry["op"] == "entropy"}
    with pytest.raises(ModuleNotFoundError):
        deviations("no_such_op")
