"""What an adapter and the engine say to each other.

An adapter is a Python module with functions named after ops (spec/ops.yaml). It may also set

    NAME, VERSION       what is checked, for the report
    KNOWN_VERSIONS      versions that the adapter was run against; another one runs with a warning
    MASK                "bool" (default), "float" or "int": the dtype in which the trainer wants masks
    ARRAYS              "torch" (default), "numpy" or "jax": the arrays that the functions take
    VARIANTS            {"policy_loss": {"aggregation": "token_mean"}}: variants that are meant, not identified
    GRADIENTS           {"policy_loss": False}: no gradient is offered for this op
    SOURCES             {"policy_loss": "mytrainer.losses:ppo_actor_loss"}: what really runs, one name or several
    accumulated_policy_loss(parts, *, …), accumulated_value_loss(parts, *, …)
                        one optimizer step as the trainer's own training loop does it: `parts` is a list of micro-batches,
                        each a tuple of the op's inputs, and the keywords are the op's. The function returns the step's loss
                        as a tensor, either still to be differentiated, or detached after it has called backward on every
                        micro-batch. In a process group `parts` are this rank's, and losses and gradients are then averaged
                        over the ranks, as DDP, FSDP and DeepSpeed do. Only `check --invariances` asks for it (INV-6, INV-7)
    setup(source)       called once before any op with the directory given as --source, or None
"""


class Unsupported(Exception):
    """Raised by an adapter for a combination of arguments that its trainer does not offer.

    The case counts as not offered, never as a failure. The message is printed, so it says why.
    """


class AdapterError(Exception):
    """No verdict is possible: the adapter does not load, or its process died, hung or broke the protocol (exit 4)."""


class UsageError(Exception):
    """The command line asks for something that does not exist (exit 2)."""
