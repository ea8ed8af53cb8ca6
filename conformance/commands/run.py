"""`goldenppo run`: the four-model PPO run, its recording, and the verification of a recording."""

import math
import sys
from pathlib import Path

COLUMNS = {
    "step": "step",
    "learned_reward": "learn",
    "true_reward": "true",
    "sequence_kl": "KL",
    "mean_entropy": "ent",
    "clip_fraction": "clip",
    "policy_loss": "policy",
    "value_loss": "value",
    "actor_grad_norm": "|gA|",
    "critic_grad_norm": "|gC|",
}


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "run",
        help="run, record or verify the tiny four-model PPO run",
        description="Trains a tiny policy and a reward model, then runs PPO with actor, critic, reference "
        "and reward model. With --verify, checks a recording stage by stage and names the first that departs "
        "(exit 1).",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the tensors live (default cpu)")
    parser.add_argument(
        "--dtype",
        choices=("float64", "float32", "bfloat16"),
        help="what the models compute in (default float64; with --verify that of the recording)",
    )
    parser.add_argument("--steps", type=int, metavar="N", help="PPO steps (default 50, tiny 3)")
    parser.add_argument("--seed", type=int, nargs="+", metavar="S", help="seed of every random number; several: several runs")
    parser.add_argument("--size", choices=("default", "tiny"), help="tiny is the size of the committed recording")
    parser.add_argument("--record", type=Path, metavar="DIR", help="write every tensor of every stage into a new folder")
    parser.add_argument(
        "--verify",
        nargs="?",
        const=Path(),
        type=Path,
        metavar="DIR",
        help="verify this recording; without DIR the one just made by --record, else the committed one",
    )
    parser.add_argument(
        "--free-running",
        action="store_true",
        help="with --verify: repeat the run and show how it drifts apart",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the learning curves as SVG")
    parser.add_argument("--tf32", action="store_true", help="let CUDA round float32 matrix products to TF32")
    parser.set_defaults(main=main)


def main(args) -> int:
    _check_usage(args)
    if args.verify is not None and args.record is None:
        return verify(args, _recording(args))
    tables = {}
    for seed in args.seed or [0]:
        tables[f"seed {seed}"] = train(args, seed)
    if args.plot:
        from goldenppo.conformance import files
        from goldenppo.conformance.render.curves import svg

        files.write(
            args.plot,
            svg({name: table for name, (table, _) in tables.items()}, _command(args, None)),
        )
    if len(tables) > 1:
        _print_table(
            "True reward over the seeds",
            ["seed", "start", "end"],
            [[n, *_rounded(ends)] for n, (_, ends) in tables.items()],
        )
    return 0 if args.verify is None else verify(args, args.record)


def _check_usage(args) -> None:
    """Refuses what cannot work before anything runs."""
    from goldenppo.adapters.interface import UsageError
    from goldenppo.conformance.files import check_writable
    from goldenppo.conformance.targets import check_device

    if args.steps is not None and args.steps < 1:
        raise UsageError(f"--steps is {args.steps}; give at least 1")
    if any(not 0 <= seed < 2**63 for seed in args.seed or []):
        raise UsageError("--seed takes integers from 0 to 2^63 - 1")
    if args.free_running and args.verify is None:
        raise UsageError("--free-running goes with --verify")
    if args.verify is not None and args.record is None and (args.steps, args.seed, args.size, args.plot) != (None,) * 4:
        raise UsageError("--steps, --seed, --size and --plot are for a new run; a recording has its own")
    if args.verify not in (None, Path()) and args.record is not None:
        raise UsageError("--record with --verify verifies the new recording; drop the folder after --verify")
    if args.record is not None and len(args.seed or []) > 1:
        raise UsageError("--record takes one seed")
    check_device(args.device)
    if args.plot:
        check_writable(args.plot)
    if args.record is not None:
        from goldenppo.reference.run.record import check_target

        try:
            check_target(args.record)
        except ValueError as problem:
            raise UsageError(str(problem)) from None


def _recording(args) -> Path:
    from goldenppo.conformance.cases import folder

    return Path(folder("fixtures")) / "run" / "cpu-float64" if args.verify == Path() else args.verify


def _command(args, target: Path | None) -> str:
    """The options that decide the numbers, as one would type them."""
    words = ["goldenppo run", f"--device {args.device}", f"--dtype {args.dtype or 'float64'}"]
    words += [f"--steps {args.steps}"] if args.steps else []
    words += [f"--seed {' '.join(map(str, args.seed))}"] if args.seed else []
    words += [f"--size {args.size}"] if args.size else []
    words += ["--tf32"] if args.tf32 else []
    return " ".join([*words, *([f"--record {target.name}"] if target else [])])


def train(args, seed: int) -> tuple[list[dict], tuple[float, float]]:
    """Runs one seed, records it if asked, and prints what happened.

    Returns:
        The table of figures, and the true reward before and after PPO.
    """
    from contextlib import nullcontext

    import torch
    from tqdm import tqdm

    from goldenppo.adapters.interface import UsageError
    from goldenppo.reference.run import memory, record
    from goldenppo.reference.run.model import save_checkpoint
    from goldenppo.reference.run.run import run
    from goldenppo.reference.run.settings import SETTINGS, deterministic, model_shape

    settings, dtype, device = (
        SETTINGS[args.size or "default"],
        args.dtype or "float64",
        torch.device(args.device),
    )
    steps = args.steps or settings["steps"]
    peaks: dict = {}
    context = record.recording(args.record) if args.record else nullcontext()
    with (
        context as folder,
        tqdm(total=steps, unit="step", leave=False, disable=not sys.stderr.isatty()) as bar,
    ):

        def save_models(models):
            for name, weights in models.items():
                save_checkpoint(folder / "models" / name, weights, model_shape(settings))

        result = run(
            args.device,
            dtype,
            steps,
            seed,
            settings=settings,
            write=(lambda name, tensors, params: record.save(folder, name, tensors, params)) if folder else None,
            on_models=save_models if folder else None,
            on_row=lambda row: bar.update(),
            on_stage=bar.set_description,
            watch=memory.watcher(peaks, device),
            tf32=args.tf32,
        )
        if folder:
            with deterministic(device, tf32=args.tf32):
                about = record.environment(device)
            manifest = {
                "command": _command(args, args.record),
                **about,
                "dtype": dtype,
                "seed": seed,
                "steps": steps,
            }
            manifest |= {"size": args.size or "default", "settings": settings, "table": result.table}
            try:
                record.seal(folder, args.record, manifest)
            except ValueError as problem:
                raise UsageError(str(problem)) from None
    ends = (result.true_reward_before, result.true_reward_after)
    show(result.table, ends, memory.flow(result.models, peaks), f"seed {seed}, {dtype} on {args.device}")
    if args.record:
        print(f"\nRecorded {steps} steps in {args.record}")
    return result.table, ends


def show(table: list[dict], ends: tuple[float, float], flow: list[dict], title: str) -> None:
    """Prints the figures of every step, the curves in a line each, and the memory flow."""
    from goldenppo.conformance.render.curves import spark

    rows = [[row["step"], *(f"{row[key]:.3f}" for key in list(COLUMNS)[1:])] for row in table]
    _print_table(f"PPO, {title}", list(COLUMNS.values()), rows)
    print("learn, true: reward by the reward model and by the rule; ent: entropy;")
    print("clip: clipped tokens; |gA|, |gC|: gradient norms of actor and critic\n")
    for key, name in (
        ("true_reward", "true reward"),
        ("learned_reward", "learned reward"),
        ("sequence_kl", "KL"),
        ("mean_entropy", "entropy"),
    ):
        curve = [row[key] for row in table]
        print(f"{name:15} {curve[0]:7.3f} {spark(curve)} {curve[-1]:.3f}")
    print(f"\nTrue reward of the same prompts' answers: {ends[0]:.3f} before PPO, {ends[1]:.3f} after it\n")

    cells = [
        [
            row["stage"],
            row["models"] if row["models"].count(" ") < 3 else "all four",
            *(_bytes(row[key]) for key in list(row)[2:]),
        ]
        for row in flow
    ]
    _print_table(
        "Memory of one step: what each stage needs",
        ["stage", "models", "weights", "grads", "Adam", "made", *(["cuda peak"] if len(flow[0]) > 6 else [])],
        cells,
    )


def verify(args, folder: Path) -> int:
    """Verifies a recording; exit code 1 if a stage departs."""
    from goldenppo.adapters.interface import AdapterError, UsageError
    from goldenppo.reference.run.record import DamagedRecording, load

    try:
        manifest = load(folder)
        dtype = args.dtype or manifest["dtype"]
        made = f"{manifest['dtype']} on {manifest['device']['name']}, torch {manifest['versions']['torch']}"
        print(f"Recording of {manifest['steps']} steps, seed {manifest['seed']}, {made}")
        print(f"Verified in {dtype} on {args.device}\n")
        if args.free_running:
            return free_running(args, folder)
        return stage_by_stage(args, folder)
    except FileNotFoundError as problem:
        raise UsageError(str(problem)) from None
    except DamagedRecording as problem:
        raise AdapterError(str(problem)) from None


def stage_by_stage(args, folder: Path) -> int:
    """Compares each stage of a recording, fed with the recorded inputs, and prints a table; 1 if one departs."""
    from tqdm import tqdm

    from goldenppo.reference.run.verify import verify as check

    rows: dict[str, dict] = {}
    departing, left_out = [], []
    for found in tqdm(
        check(folder, args.device, args.dtype, tf32=args.tf32),
        unit="tensor",
        leave=False,
        disable=not sys.stderr.isatty(),
    ):
        row = rows.setdefault(found.stage, {"checks": 0, "op": None, "normwise": None, "left": 0, "departs": False})
        row["checks"] += 1
        row["left"] += len(found.left_out)
        if found.law != "exact":
            row[found.law] = max(row[found.law] or 0.0, found.use)
        # not-a-number is not at most 1
        if not found.use <= 1:
            row["departs"] = True
            departing.append(found)
        left_out += [f"{_place(found)}: {sentence}" for sentence in found.left_out]
    cells = [
        [
            stage,
            row["checks"],
            _use(row["op"]),
            _use(row["normwise"]),
            row["left"] or "",
            "departs" if row["departs"] else "ok",
        ]
        for stage, row in rows.items()
    ]
    _print_table(
        "Worst share of the tolerance used (1 is the limit)",
        ["stage", "tensors", "op law", "normwise", "left out", ""],
        cells,
    )
    for sentence in left_out:
        print(f"  left out: {sentence}")
    if not departing:
        print("\nEvery stage agrees.")
        return 0
    first = departing[0]
    print(f"\nThe first stage that departs: {first.stage}, {_place(first)}")
    for found in departing[:5]:
        whose = "the recorded tensor" if found.whose == "recording" else "what is computed here"
        how = "is not equal" if found.law == "exact" else f"is {_use(found.use)} times the {found.law} tolerance away"
        print(f"  {_place(found)}: {found.stage}: {found.tensor}: {whose} {how}")
    if len(departing) > 5:
        print(f"  … and {len(departing) - 5} more tensors")
    return 1


def free_running(args, folder: Path) -> int:
    """Repeats a recorded run from its seed and prints how far it drifts apart; no verdict."""
    from goldenppo.reference.run.free_running import free_run

    found = free_run(folder, args.device, args.dtype, tf32=args.tf32)
    rows = [
        [
            entry.file,
            entry.tokens or "",
            f"{entry.error:.1e}",
            "" if math.isnan(entry.weights) else f"{entry.weights:.1e}",
        ]
        for entry in found
    ]
    _print_table("Left to itself: distance from the recording", ["file", "tokens", "largest", "weights"], rows)
    first = next((entry for entry in found if entry.diverged), None)
    if first is None:
        print("\nThe run stays within the normwise law to its end.")
    else:
        why = (
            f"{first.tokens} tokens differ"
            if first.tokens
            else f"{first.tensor} is off by {first.error:.1e} of its largest element"
        )
        print(f"\nFirst divergence: {first.file}: {why}")
    return 0


def _place(found) -> str:
    return "before PPO" if found.step < 0 else f"step {found.step}"


def _use(use: float | None) -> str:
    return "" if use is None else f"{use:.3g}"


def _rounded(numbers) -> list[str]:
    return [f"{number:.3f}" for number in numbers]


def _bytes(size: int) -> str:
    return (
        ""
        if size == 0
        else f"{size} B"
        if size < 1024
        else f"{size / 1024:.1f} KiB"
        if size < 2**20
        else f"{size / 2**20:.1f} MiB"
    )


def _print_table(title: str, headers: list[str], rows: list[list]) -> None:
    from tabulate import tabulate

    print(title)
    align = [
        "left" if any(isinstance(row[i], str) and row[i][:1].isalpha() for row in rows) else "right" for i in range(len(headers))
    ]
    print(tabulate(rows, headers=headers, colalign=align, disable_numparse=True))
