"""Dumps with a bug planted, made from the cases of the fixtures and the deviations of the catalogue."""

import json
import math

import torch
from safetensors.torch import save_file

from goldenppo.conformance.audit.edges import EDGES
from goldenppo.conformance.cases import Case, load, table
from goldenppo.conformance.naming import Evaluator


def dump_of(path, op: str, case: Case, answer: dict, dtype: str = "float64") -> str:
    """Writes a case's inputs and an answer to them as a dump; returns the name of the edge that joins them."""
    edge, spec = next(edge for edge in EDGES if edge.op == op), table()["ops"][op]
    tensors, params = {}, {}
    kinds = {"bool": torch.bool, "int": torch.int64}
    for name, about in spec["inputs"].items():
        tensors[edge.inputs[name][0]] = torch.tensor(case.inputs[name], dtype=kinds.get(about.get("kind"), getattr(torch, dtype)))
    for name, about in spec["params"].items():
        value = case.params.get(name)
        if "shape" in about and value is not None:
            tensors[name] = torch.tensor(value, dtype=kinds.get(about.get("kind"), getattr(torch, dtype)))
        elif "shape" not in about:
            params[edge.params.get(name, (name,))[0]] = value
    for output, names in edge.outputs.items():
        if output in answer:
            made, shape = torch.tensor(answer[output], dtype=getattr(torch, dtype)), case.answers[output][0].block.shape
            tensors[names[0]] = made.reshape(shape) if made.numel() == math.prod(shape) else made  # one bug reduces nothing
    loss = next(iter(edge.outputs))
    for name in spec["outputs"][loss].get("gradients", []):
        if f"grad_{name}" in answer:
            shape = case.answers[loss][0].gradients[name].shape
            gradient = torch.tensor(answer[f"grad_{name}"], dtype=getattr(torch, dtype)).reshape(shape)
            tensors[f"{edge.outputs[loss][0]}_grad_{name}"] = gradient
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"params": json.dumps(params)})
    return edge.name


def cases_of(op: str) -> list[Case]:
    """Cases that a dump can hold, ordinary ones first."""
    return sorted((case for case in load(op) if not case.edge and not case.precision), key=lambda case: case.level != "must")


def answers(op: str, function, case: Case):
    """What a deviation answers under every variant that the case tells apart, and the variant."""
    evaluator, seen = Evaluator(op), []
    for entries in case.answers.values():
        for entry in entries:
            axes = {axis: values[0] for axis, values in entry.when.items()}
            if axes not in seen:
                seen.append(axes)
                answer = evaluator.evaluate(function, case, axes)
                if answer is not None:
                    yield axes, answer
